"""What a plan says a layout costs, against numbers worked by hand."""

from typing import Any

import pytest

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.config import FSDPConfig, MixedPrecision, ParallelismConfig, PipelineConfig, PipelineSchedule
from hydra_parallelism.plan import collectives, schedules
from hydra_parallelism.plan.composition import Case
from hydra_parallelism.plan.machine import Link, MachineConfig, read_machine
from hydra_parallelism.plan.memory import activations, memory_of
from hydra_parallelism.plan.model import Model, ModelConfig, read_model
from hydra_parallelism.plan.price import price
from hydra_parallelism.plan.share import fullest
from hydra_parallelism.plan.traffic import traffic

SMALL: dict[str, Any] = {
    "hidden": 8,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 16,
    "vocab": 32,
    "sequence": 16,
    "micro_batch": 2,
}
"""Attention 8*8*2 + 2*8*4 = 192, feed-forward 3*8*16 = 384, norms 16: 592 a block. Embedding 256, head 264. 2888 in all."""
LLAMA_3_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "sequence": 8192}
MIXTRAL_8X7B = {**LLAMA_3_8B, "vocab": 32000, "experts": 8}
GPT_3 = {"hidden": 12288, "layers": 96, "heads": 96, "ffn": 4 * 12288, "vocab": 51200, "sequence": 2048, "gated": False}


def model(**numbers: Any) -> Model:
    read = read_model(ModelConfig(**numbers))
    assert isinstance(read, Model)
    return read


def case(topology: Topology, **policies: Any) -> Case:
    return Case(topology, read_machine(MachineConfig(), topology.world_size), ParallelismConfig(**policies), False)


def moved(topology: Topology, rank: int = 0, of: dict[str, Any] = SMALL, **policies: Any) -> list[tuple[Any, ...]]:
    found = traffic(case(topology, **policies), model(**of), rank)
    return [(e.axis, e.operation, e.what, e.count, e.cost.wire_bytes) for e in found]


BF16 = FSDPConfig(mixed_precision=MixedPrecision.bf16)


def test_parameters_of_known_models() -> None:
    """As the model cards' checkpoints have them."""
    assert model(**LLAMA_3_8B).params == 8_030_261_248
    assert model(**MIXTRAL_8X7B).params == 46_702_792_704
    assert model(**SMALL).params == 256 + 4 * 592 + 264 == 2888
    assert model(**SMALL, tied=True).params == 2888 - 256


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"hidden": 8}, "model.hidden=8 is part of a shape, which needs layers, heads, ffn, vocab, sequence too"),
        ({"params": 5, "layers": 2}, "model.params=5 and model.layers=2: say the number or the shape"),
        ({**SMALL, "heads": 3, "kv_heads": 3}, "model.hidden=8 does not divide by model.heads=3"),
        ({**SMALL, "kv_heads": 3}, "model.heads=4 does not divide by model.kv_heads=3"),
        ({**SMALL, "experts": 2, "top_k": 3}, "model.top_k=3 is more than model.experts=2"),
        ({"params": 0}, "model.params=0: must be at least 1"),
    ],
)
def test_models_that_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_model(ModelConfig(**numbers))
    assert str(error.value) == f"model is not valid:\n  {message}"


def test_nothing_said_is_nothing_priced() -> None:
    assert read_model(ModelConfig()) is None


def test_sixteen_bytes_a_parameter() -> None:
    """float32: 4 for the parameter, 4 for its gradient, 8 for Adam's moments; of that each of 4 shards a quarter."""
    one = memory_of(model(**SMALL), Topology(), ParallelismConfig())
    assert (one.parameters, one.gradients, one.optimizer, one.gathered) == (4 * 2888, 4 * 2888, 8 * 2888, 0)
    four = memory_of(model(**SMALL), Topology(dp_shard=4), ParallelismConfig())
    assert (four.parameters, four.gradients, four.optimizer) == (2888, 2888, 5776)
    # Two blocks and the root whole, and the gradient of a block: 4 * (2 * 592 + 520) + 4 * 592.
    assert four.gathered == 4 * 1704 + 4 * 592
    assert memory_of(2888, Topology(dp_shard=2, tp=2), ParallelismConfig()).parameters == 2888
    serving = memory_of(model(**SMALL), Topology(), ParallelismConfig(inference=True))
    assert (serving.gradients, serving.optimizer, serving.activations) == (0, 0, 0)


def test_policies_of_fsdp() -> None:
    at, of = Topology(dp_shard=4), model(**SMALL)
    assert memory_of(of, at, ParallelismConfig(fsdp=BF16)).gathered == 2 * 1704 + 4 * 592
    keep = ParallelismConfig(fsdp=FSDPConfig(reshard_after_forward=False))
    assert memory_of(of, at, keep).gathered == 4 * 2888 + 4 * 592
    offloaded = memory_of(of, at, ParallelismConfig(fsdp=FSDPConfig(cpu_offload=True)))
    assert offloaded.device == offloaded.gathered + (offloaded.activations or 0)


def test_what_a_stage_and_a_tensor_rank_hold() -> None:
    """Norms are whole over tp: (192 + 384) / 2 + 16 = 304 a block. Of two stages the one with the head: 2 * 304 + 128 + 8."""
    share = fullest(model(**SMALL), Topology(pp=2, tp=2), ParallelismConfig())
    assert (share.blocks, share.block, share.experts, share.ends, share.params) == (2, 304, 0, 136, 744)


def test_what_an_expert_rank_holds() -> None:
    """Four experts of 384 and a router of 8 * 4 over ep=2: two experts whole; sharded over efsdp=2, the rest over fsdp=4."""
    of, at = model(**SMALL, experts=4), Topology(dp_shard=4, ep=2)
    share = fullest(of, at, ParallelismConfig())
    assert (share.block, share.experts) == (192 + 16 + 32, 2 * 384)
    assert memory_of(of, at, ParallelismConfig()).parameters == 4 * ((4 * 240 + 520) / 4 + 4 * 768 / 2)


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti et al.: 34 * s * b * h bytes a layer, of which 2 are masks of dropout; 10 + 24 / t; 34 / t.

    Here without dropout: of the 10 two are masks, so 8 + 24 / t and 32 / t.
    """
    of = model(**GPT_3)
    unit, logits = 2048 * 12288 * 96, 4 * 51200 * 2048
    half = ParallelismConfig(fsdp=BF16)
    assert activations(of, Topology(), half) == 32 * unit + logits
    assert activations(of, Topology(tp=8), half) == (8 + 24 / 8) * unit + logits
    parallel = ParallelismConfig(fsdp=BF16, enable_sequence_parallel=True)
    assert activations(of, Topology(tp=8), parallel) == 32 / 8 * unit + logits
    full = ParallelismConfig(fsdp=BF16, activation_checkpointing="full")
    assert activations(of, Topology(), full) == 2 * unit + 30 * unit / 96 + logits
    assert activations(of, Topology(ring=4), half) == (32 * unit + logits) / 4


def test_activations_of_a_pipeline() -> None:
    """A token keeps 32 + 16 + 8 + 64 = 120 numbers a block, 4 bytes each; 32 tokens, two blocks a stage, two in flight."""
    of, stage, logits = model(**SMALL), 2 * 120 * 4 * 32, 4 * 32 * 32
    assert activations(of, Topology(pp=2), ParallelismConfig()) == 2 * stage
    gpipe = ParallelismConfig(pipeline=PipelineConfig(schedule=PipelineSchedule.GPipe, microbatches=8))
    assert activations(of, Topology(pp=2), gpipe) == 8 * (stage + logits)


@pytest.mark.parametrize(
    ("schedule", "flying", "idle"),
    [
        ("GPipe", 8, 3 / 8), ("1F1B", 4, 3 / 8), ("Interleaved1F1B", 5.5, 3 / 16), ("LoopedBFS", 8, 3 / 16),
        ("InterleavedZeroBubble", 5.5, None), ("ZBVZeroBubble", 4, None), ("DualPipeV", 8, None),
    ],
)  # fmt: skip
def test_four_stages_and_eight_micro_batches(schedule: str, flying: float, idle: float | None) -> None:
    assert schedules.in_flight(schedule, 4, 8) == flying
    assert schedules.bubble(schedule, 4, 8) == idle


def test_messages_of_a_pipeline() -> None:
    assert [schedules.sends("1F1B", 4, rank) for rank in range(4)] == [1, 2, 2, 1]
    assert [schedules.sends("Interleaved1F1B", 4, rank) for rank in range(4)] == [3, 4, 4, 3]
    assert [schedules.sends("ZBVZeroBubble", 4, rank) for rank in range(4)] == [2, 4, 4, 2]  # 0-1-2-3=3-2-1-0
    assert schedules.microbatches_of(PipelineConfig(), 4) == 8
    assert schedules.microbatches_of(PipelineConfig(schedule=PipelineSchedule.DualPipeV), 4) == 16


def test_collectives() -> None:
    """8 ranks, 800 bytes, 1 us and 100 bytes a second: seven steps of 100 bytes."""
    link = Link(1e-6, 100.0)
    assert collectives.all_gather(800, 8, link).wire_bytes == collectives.reduce_scatter(800, 8, link).wire_bytes == 700
    assert collectives.all_gather(800, 8, link).seconds == pytest.approx(7 * (1 + 1e-6))
    assert collectives.all_reduce(800, 8, link) == collectives.all_gather(800, 8, link).times(2)
    assert collectives.all_to_all(800, 8, link).wire_bytes == 700
    assert collectives.send(100, link).seconds == pytest.approx(1 + 1e-6)
    assert collectives.all_reduce(800, 1, link) == collectives.Cost(0, 0)


def test_traffic_of_replicas_and_shards() -> None:
    """HSDP 2 x 2: half of each gather is sent, blocks twice, the root once; replicas all-reduce half of the gradients."""
    assert moved(Topology(dp_replicate=2, dp_shard=2)) == [
        ("dp_replicate", "all-reduce", "gradients", 4, 4 * 4 * 592 / 2),
        ("dp_replicate", "all-reduce", "gradients", 1, 4 * 520 / 2),
        ("fsdp", "all-gather", "parameters", 8, 8 * 4 * 592 / 2),
        ("fsdp", "reduce-scatter", "gradients", 4, 4 * 4 * 592 / 2),
        ("fsdp", "all-gather", "parameters", 1, 4 * 520 / 2),
        ("fsdp", "reduce-scatter", "gradients", 1, 4 * 520 / 2),
    ]
    served = moved(Topology(dp_shard=2), inference=True, fsdp=BF16)
    assert served == [("fsdp", "all-gather", "parameters", 4, 4 * 592), ("fsdp", "all-gather", "parameters", 1, 520)]


def test_traffic_of_activations() -> None:
    """32 tokens of 8 numbers are 1024 bytes, 32 logits of each 4096.

    Of four blocks: two sums forward; backward one for each of queries, keys, values, gate and up. Over two ranks each sends as
    much as it reduces, and half of what it gathers.
    """
    ends = [
        ("tp", "all-reduce", "embeddings", 1, 1024),
        ("tp", "all-gather", "logits", 1, 4096 / 2),
        ("tp", "all-reduce", "gradients of the head's input", 1, 1024),
    ]
    assert moved(Topology(tp=2)) == [
        ("tp", "all-reduce", "activations", 8, 8 * 1024),
        ("tp", "all-reduce", "their gradients", 20, 20 * 1024),
        *ends,
    ]
    # Two zones a block, both ways, and once in and once out of the blocks; 16 numbers of norms a block.
    assert moved(Topology(tp=2), enable_sequence_parallel=True) == [
        ("tp", "all-gather", "activations", 18, 18 * 512),
        ("tp", "reduce-scatter", "activations", 16, 16 * 512),
        ("tp", "all-reduce", "gradients of whole weights", 4, 4 * 4 * 16),
        *ends,
    ]
    assert moved(Topology(pp=2)) == [("pp", "send", "activations", 4, 4 * 1024)]
    assert moved(Topology(pp=4), rank=1) == [("pp", "send", "activations", 16, 16 * 1024)]


def test_what_is_recomputed_is_sent_again_but_for_the_last_sum() -> None:
    """Checkpointing stops when all that backward needs is there: three sums a block instead of two."""
    assert moved(Topology(tp=2), activation_checkpointing="full")[0][3] == 12
    full = moved(Topology(tp=2), activation_checkpointing="full", enable_sequence_parallel=True)
    assert [each[3] for each in full[:2]] == [26, 20]


def test_units_gathered_by_micro_batches() -> None:
    """Once for each of 4 and once more, in a pipeline; twice for each of 4 calls without one, and the root once each."""
    gathers = [each[3] for each in moved(Topology(pp=2, dp_shard=2)) if each[1] == "all-gather"]
    assert gathers == [2 * 5, 1]
    calls = [each[3] for each in moved(Topology(dp_shard=2), of={**SMALL, "batch": 16}) if each[1] == "all-gather"]
    assert calls == [4 * 8, 4]
    split = PipelineConfig(schedule=PipelineSchedule.InterleavedZeroBubble)
    assert [e[3] for e in moved(Topology(pp=2, dp_shard=2), pipeline=split) if e[1] == "all-gather"] == [2, 1]


def test_traffic_of_context_axes() -> None:
    """Over two ranks 16 tokens each. A block of keys and values is 2 * 16 * 4 numbers; queries are 16 * 8."""
    ring = [each for each in moved(Topology(ring=2)) if each[0] == "ring"]
    assert ring == [("ring", "send", "keys and values", 8, 8 * 512), ("ring", "send", "their gradients", 4, 4 * 512)]
    ulysses = [each for each in moved(Topology(ulysses=2)) if each[0] == "ulysses"]
    assert ulysses == [
        ("ulysses", "all-to-all", "queries and results", 16, 16 * 512 / 2),
        ("ulysses", "all-to-all", "keys and values", 16, 16 * 256 / 2),
    ]


def test_traffic_of_experts() -> None:
    """Each of 32 tokens goes to two experts: 2048 bytes, of which half leave the rank. Experts are gathered over efsdp=2."""
    found = moved(Topology(dp_shard=4, ep=2), of={**SMALL, "experts": 4})
    assert found[-2:] == [
        ("ep", "all-to-all", "tokens", 16, 16 * 1024),
        ("ep", "all-gather", "counts of tokens", 4, 4 * 8 * 4),
    ]
    assert ("efsdp", "all-gather", "parameters", 8, 8 * 4 * 768 / 2) in found
    assert ("fsdp", "all-gather", "parameters", 8, 8 * 4 * 240 * 3 / 4) in found


@pytest.mark.parametrize(
    ("numbers", "at", "policies", "reason"),
    [
        ({"tied": True}, Topology(pp=2), {}, "model.tied=true, but with parallelism.pp_size=2 embedding and head are in two "
         "stages and cannot be one weight; try model.tied=false"),
        ({}, Topology(pp=8), {}, "model.layers=4 is less than the 8 stages of parallelism.pp_size=8 under 1F1B"),
        ({}, Topology(pp=2), {"pipeline": PipelineConfig(split=[["a"], ["b"]])},
         "parallelism.pipeline.split names modules, which numbers do not have; try parallelism.pipeline.split=auto"),
        ({}, Topology(tp=4), {}, "model.kv_heads=2 does not divide by parallelism.tp_size=4"),
        ({"experts": 4}, Topology(dp_shard=2, tp=2, ep=4), {}, "parallelism.ep_size=4 with parallelism.tp_size=2: the tp ranks "
         "have the same tokens, which only ep_size=tp_size or parallelism.enable_sequence_parallel=true makes use of"),
    ],
)  # fmt: skip
def test_what_would_be_refused_is_not_priced(
    numbers: dict[str, Any], at: Topology, policies: dict[str, Any], reason: str
) -> None:
    for of in (traffic, lambda case, model, _: memory_of(model, case.topology, case.config)):
        with pytest.raises(ConfigurationError) as error:
            of(case(at, **policies), model(**{**SMALL, **numbers}), 0)
        assert str(error.value) == f"the model does not go with the layout:\n  {reason}"


def test_a_batch_is_made_of_whole_calls() -> None:
    with pytest.raises(ConfigurationError) as error:
        moved(Topology(pp=2, dp_shard=2), of={**SMALL, "batch": 24})
    assert str(error.value) == (
        "the model does not go with the layout:\n  model.batch=24 does not divide by dp=2 * micro-batches of the pipeline=4 * "
        "model.micro_batch=2 = 16"
    )


def test_a_data_rank_takes_its_share_of_the_batch_unless_told() -> None:
    """Sixteen sequences over two pipelines of four micro-batches are two at a time."""
    of = {**SMALL, "micro_batch": None, "batch": 16}
    assert moved(Topology(pp=2, dp_shard=2), of=of) == moved(Topology(pp=2, dp_shard=2))
    assert moved(Topology(tp=2), of=of) == moved(Topology(tp=2), of={**SMALL, "micro_batch": 16})


def test_a_group_within_a_node_is_faster() -> None:
    near, far = (price(case(Topology(tp=ranks)), model(**{**LLAMA_3_8B, "kv_heads": 16}), 0)["traffic"][0] for ranks in (8, 16))
    assert near["seconds"] == pytest.approx(near["count"] * 14 * 3.4e-6 + near["bytes"] / 450e9)
    assert far["seconds"] == pytest.approx(far["count"] * 30 * 14e-6 + far["bytes"] / 50e9)


def test_a_price_as_data() -> None:
    found = price(case(Topology(dp_shard=8)), 70_000_000_000, 0)
    assert found["memory"]["device"] == 16 * 70e9 / 8
    assert (found["traffic"], found["seconds"], found["pipeline"]) == (None, None, None)
    assert found["warnings"] == ["a rank needs at least 140.0 GB, but world.memory_gb=80"]
    piped = price(case(Topology(pp=4)), model(**SMALL), 0)
    assert piped["pipeline"] == {"schedule": "1F1B", "microbatches": 8, "bubble": 3 / 8}
    assert piped["warnings"] == []
