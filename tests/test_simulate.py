"""parallelism.simulate: one process is one rank of a large world."""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import torch.distributed as dist
import yaml
from hydra import compose, initialize
from omegaconf import OmegaConf

import hydra_parallelism as hp
from apps import tiny
from hydra_parallelism import fake_groups, simulation
from hydra_parallelism._compat import registered_groups
from processes import ROOT, clean_environment, python, run

VERSION: dict[str, Any] = {"version_base": None} if hydra.__version__.startswith("1.3") else {}
TRAIN = ROOT / "examples/train.py"
PLAN = {"token_embedding": "embedding_rowwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


def simulated(size: int, rank: int = 0, **config: Any) -> dict[str, Any]:
    return {**config, "simulate": {"world_size": size, "rank": rank}}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, size: int = 8) -> float:
    batch = tiny.batch(0, size)
    inputs, targets = hp.shard_sequence(batch.inputs[:, :4], batch.targets[:, :4])
    loss = hp.forward_backward(model, {"tokens": inputs}, targets, tiny.cross_entropy)
    if optimizer is not None:
        optimizer.step()
    return loss.item()


def test_rank_37_of_512_sits_where_an_independent_count_says() -> None:
    # 37 in the mixed base (2, 2, 16, 1, 1, 8), innermost digit last: 37 = 4 * 8 + 5.
    config = simulated(512, 37, pp_size=2, dp_replicate=2, dp_shard=16, tp_size=8)
    with hp.parallel_context(config) as context:
        assert context.coordinate == {"pp": 0, "dp_replicate": 0, "dp_shard": 4, "cfg": 0, "ring": 0, "ulysses": 0, "tp": 5}
        assert (context.rank, context.world_size, context.dp_rank, context.local_rank) == (37, 512, 4, 5)
        assert (context.world.nnodes, context.world.node_rank) == (64, 4)
        assert dist.get_process_group_ranks(context.mesh["tp"].get_group()) == list(range(32, 40))
        assert dist.get_process_group_ranks(context.mesh["pp"].get_group()) == [37, 37 + 256]
        assert dist.get_process_group_ranks(context.mesh["dp_shard"].get_group()) == [8 * n + 5 for n in range(16)]
        assert context.mesh["dp_replicate", "fsdp"].shape == (2, 16)
        assert (context.backend, context.device.type) == ("fake", "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("config", "rank", "shapes"),
    [
        ({"dp_shard": 8}, 5, {"layers.0.mlp.up.weight": (4, 16), "layers.0.mlp.up.bias": (4,), "head.weight": (4, 16)}),
        ({"dp_shard": 64}, 37, {"layers.0.mlp.up.weight": (0, 16), "layers.0.mlp.up.bias": (0,)}),  # 32 rows for 64 ranks
        ({"dp_replicate": 8, "dp_shard": 2}, 1, {"layers.0.mlp.up.weight": (16, 16)}),
        (
            {"dp_shard": 4, "tp_size": 2, "tp_plan": PLAN},
            3,
            {"layers.0.mlp.up.weight": (4, 16), "layers.0.mlp.down.weight": (4, 16), "head.weight": (8, 16)},
        ),
        ({"dp_shard": 2, "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}, 3, {"head.weight": (4, 16)}),
        ({"pp_size": 2, "dp_shard": 4}, 6, {"layers.2.mlp.up.weight": (8, 16), "head.weight": (8, 16)}),
    ],
    ids=["fsdp", "more ranks than rows", "hsdp", "fsdp_tp", "usp", "pp_fsdp"],
)
def test_a_rank_holds_its_shards_and_trains(config: dict[str, Any], rank: int, shapes: dict[str, tuple[int, ...]]) -> None:
    config = {"context_parallel": {}, **config}
    size = math.prod(value for value in {**config, **config["context_parallel"]}.values() if isinstance(value, int))
    with hp.parallel_context(simulated(size, rank, **config)):
        model = hp.parallelize(tiny.make("gpt"))
        held = {name: tuple(parameter.to_local().shape) for name, parameter in model.named_parameters()}
        assert {name: held[name] for name in shapes} == shapes
        assert math.isfinite(train(model, torch.optim.AdamW(model.parameters())))
    assert registered_groups() == 0


@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_rank_of_a_pipeline_makes_up_what_it_receives(schedule: str, rank: int) -> None:
    config = simulated(16, rank, pp_size=2, dp_shard=8, pipeline={"schedule": schedule, "microbatches": 4})
    with hp.parallel_context(config):
        model = hp.parallelize(tiny.make("two"))  # two tensors pass between stages
        assert math.isfinite(train(model))
        assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters() if p.grad is not None)
        with pytest.raises(hp.ConfigurationError, match=r"a simulated rank of a pipeline .* has no output") as refusal:
            with torch.no_grad():
                model(tokens=tiny.batch(0, 8).inputs)
        assert "try: hydra_parallelism.forward_backward" in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [{}, {"fsdp": {"mixed_precision": "bf16"}}, {"tp_size": 2, "tp_plan": "auto", "enable_sequence_parallel": True}],
    ids=["plain", "bf16", "sequence parallel"],
)
def test_a_stage_is_told_the_shapes_that_the_stage_before_sends(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra_parallelism.parallelize import schedule

    stages: list[Any] = []
    made = schedule._Stage.__init__
    monkeypatch.setattr(
        schedule._Stage, "__init__", lambda self, *args, **kw: (made(self, *args, **kw), stages.append(self))[0]
    )
    monkeypatch.setattr(tiny.GPT, "tp_plan", PLAN, raising=False)
    for rank in (0, 15):
        with hp.parallel_context(simulated(16, rank, pp_size=2, dp_shard=-1, **config)):
            train(hp.parallelize(tiny.make("gpt")))
    first, last = (stage._stage_meta for stage in stages)  # the first stage has computed what it sends
    assert [(m.shape, m.dtype) for m in first.outputs] == [(m.shape, m.dtype) for m in last.inputs]
    assert [(m.shape, m.dtype) for m in first.output_grads] == [(m.shape, m.dtype) for m in last.input_grads]


def test_experts() -> None:
    with hp.parallel_context(simulated(64, 37, dp_shard=4, dp_replicate=-1, ep_size=4, ep_plan="auto")):
        model = hp.parallelize(tiny.make("moe"))
        assert model.layers[0].mlp.experts.down_proj.to_local().shape == (1, 16, 16)  # 4 experts over 4 ranks
        assert math.isfinite(train(model))


def test_memory_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydra_parallelism")
    with hp.parallel_context(simulated(16, 3, dp_replicate=2, dp_shard=8)) as context:
        model = hp.parallelize(tiny.make("gpt"))
        whole = sum(parameter.numel() for parameter in tiny.make("gpt").parameters()) * 4
        train(model, torch.optim.AdamW(model.parameters()))
        steps = 4 * len(list(model.parameters()))  # AdamW counts its steps in one float for each parameter
        assert context.holdings is not None
        found = context.holdings.parameters, context.holdings.gradients, context.holdings.optimizer
    shard = sum(
        -(-p.shape[0] // 8) * p[0].numel() * 4 for p in tiny.make("gpt").parameters() if 3 * -(-p.shape[0] // 8) < p.shape[0]
    )
    assert found == (shard, shard, 2 * shard + steps)
    assert whole / 8 * 0.9 < shard < whole / 8 * 1.1
    start, _, end = (record.getMessage() for record in caplog.records)
    assert start == (
        "simulating rank 3 of 16 (parallelism.simulate.world_size=16): it is alone and its collectives do nothing, so losses "
        "mean nothing"
    )
    numbers = re.fullmatch(
        r"rank 3 of 16 held parameters ([\d.]+) KiB, gradients \1 KiB, optimizer state ([\d.]+) KiB; peak of this process .*",
        end,
    )
    assert numbers is not None, end
    assert float(numbers[1]) == pytest.approx(shard / 1024, abs=0.06)


def test_a_model_on_meta_gets_memory_for_its_shards_alone() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(8)))  # 8 GiB in float32
    config = simulated(4096, 37, dp_shard=-1, fsdp={"wrap": ["Linear"]})
    with hp.parallel_context(config) as context:
        hp.parallelize(model)
        assert context.holdings is not None
        assert context.holdings.parameters == 8 * (1 << 28) * 4 // 4096
        assert all(torch.isfinite(parameter.to_local()).all() for parameter in model.parameters())


def test_checkpoints_are_read_and_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = tiny.make("gpt")
    hp.save(tmp_path / "whole", whole, extra={"step": 3})
    with hp.parallel_context(simulated(8, 5, dp_shard=-1)):
        torch.manual_seed(7)
        model = hp.parallelize(tiny.GPT())
        assert hp.load(tmp_path / "whole", model) == {"step": 3}
        expected = whole.layers[1].mlp.up.weight.chunk(8)[5]
        assert torch.equal(model.layers[1].mlp.up.weight.to_local(), expected)
        hp.save(tmp_path / "mine", model)
        hp.export(tmp_path / "mine.pt", model)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert [message for message in caplog.messages if message.startswith("no checkpoint")] == [
        f"no checkpoint {tmp_path / 'mine'}: rank 5 is simulated (parallelism.simulate.world_size=8), and the other 7 ranks "
        "have no parts to write"
    ]


def test_losses_norms_and_the_store_answer_from_this_rank() -> None:
    with hp.parallel_context(simulated(1024, 5, dp_shard=-1)) as context:
        assert hp.average_loss(2.5).item() == 2.5
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.tensor([3.0, 4.0])
        assert hp.clip_grad_norm_([weight], math.inf).item() == pytest.approx(5 / math.sqrt(1024))  # its share of a copy
        with pytest.raises(dist.DistStoreError):
            context.store.get("host/6")
        received = fake_groups.pretend_to_receive(torch.full((2,), 9))
        assert received.tolist() == [0, 0]


def test_a_simulated_job_leaves_nothing_behind() -> None:
    before = dict(os.environ)
    for _ in range(2):
        with hp.parallel_context(simulated(64, 9, dp_shard=-1)) as context:
            train(hp.parallelize(tiny.make("gpt")))
            assert context.topology.dp_shard == 64
        assert (dict(os.environ), dist.is_initialized(), registered_groups()) == (before, False, 0)
    with hp.parallel_context({"dp_shard": -1}) as context:  # a real one
        assert (context.world_size, context.backend, context.holdings) == (1, "gloo", None)
        model = hp.parallelize(tiny.make("gpt"))
        assert train(model, torch.optim.SGD(model.parameters(), 0.1)) == pytest.approx(math.log(32), abs=0.5)


def test_resolvers_answer_for_the_simulated_rank() -> None:
    with initialize(None, **VERSION):
        config = compose(overrides=["+parallelism=hsdp", "parallelism.simulate.world_size=64", "parallelism.simulate.rank=37"])
    asked = {"a": "rank", "b": "dp_rank", "c": "nnodes", "d": "local_world_size", "e": "fsdp", "f": "local_rank"}
    OmegaConf.set_struct(config, False)
    config.merge_with({key: f"${{parallelism:{name}}}" for key, name in asked.items()})
    config.d = "${parallelism.per_dp_rank:128}"
    assert [config[name] for name in "abcdef"] == [37, 37, 8, 2, 8, 5]
    with hp.parallel_context(config.parallelism) as context:
        assert (context.topology.dp_replicate, context.topology.dp_shard) == (8, 8)


@pytest.mark.parametrize(
    ("simulate", "text"),
    [
        ({"world_size": 8, "rank": 8}, "parallelism is not valid:\n  parallelism.simulate.rank=8 must be less than "
            "parallelism.simulate.world_size=8\n  try: parallelism.simulate.rank=7"),
        ({"rank": 37}, "parallelism.simulate.rank=37 is a rank of no world: parallelism.simulate.world_size is not set\n"
            "  try: parallelism.simulate.world_size=64"),
        ({"world_size": 12}, "parallelism is not valid:\n  parallelism.simulate.world_size=12 does not fill nodes of "
            "parallelism.simulate.per_node=8: 12 % 8 = 4\n  try: parallelism.simulate.per_node=6, or "
            "parallelism.simulate.world_size=16"),
        ({"world_size": 0, "per_node": 0}, "parallelism is not valid:\n  parallelism.simulate.world_size=0: must be a whole "
            "number of at least 1\n  parallelism.simulate.per_node=0: must be a whole number of at least 1"),
        ({"world": 8}, "parallelism is not valid:\n  parallelism.simulate.world: no such key"),
        (8, "parallelism.simulate=8: must be a mapping\n  try: parallelism.simulate.world_size=4096"),
        ({"world_size": 64}, "parallelism does not fit the world:\n  pp_size=1 * dp_replicate=1 * dp_shard=1 * "
            "cfg_parallel=1 * ring_degree=1 * ulysses_degree=1 * tp_size=3 = 3, but parallelism.simulate.world_size=64\n"
            "  try: parallelism.tp_size=64, or start 3 processes"),
    ],
)  # fmt: skip
def test_refusals(simulate: Any, text: str) -> None:
    with pytest.raises(hp.ConfigurationError) as error:
        hp.init({"tp_size": 3, "simulate": simulate})
    assert str(error.value) == text
    hp.shutdown()


def test_a_declared_world_size_is_compared() -> None:
    with pytest.raises(hp.ConfigurationError, match=r"^parallelism.world_size=8, but parallelism.simulate.world_size=64\n"):
        hp.init(simulated(64, world_size=8))
    hp.shutdown()


def test_two_worlds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(hp.ConfigurationError) as error:
        hp.init(simulated(64))
    assert str(error.value) == (
        "parallelism.simulate.world_size=64 makes one process one rank of a world without the others, but WORLD_SIZE=2 "
        "(environment variables) has started 2 processes\n"
        "  try: python ... parallelism.simulate.world_size=64 parallelism.simulate.rank=1, or "
        "parallelism.simulate.world_size=null"
    )
    hp.shutdown()


def test_a_default_group_that_is_there_is_refused() -> None:
    fake_groups.register()
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(hp.ParallelismError, match="but torch has a default process group already\n  try: torch"):
            hp.init(simulated(64))
    finally:
        hp.shutdown()
        dist.destroy_process_group()


def test_sweepers_that_compare_results_are_refused() -> None:
    world = simulation.read(simulated(64), "parallelism")
    config = OmegaConf.create(
        {"hydra": {"sweeper": {"_target_": "x.Optuna"}, "runtime": {"choices": {"hydra/sweeper": "tpe"}}}}
    )
    with pytest.raises(hp.ConfigurationError) as error:
        simulation.refuse_sweeper(config, world)
    assert str(error.value) == (
        "hydra/sweeper=tpe compares what its jobs return, and with parallelism.simulate.world_size=64 losses and speeds mean "
        "nothing\n  try: hydra/sweeper=basic, or hydra-parallelism plan --rank"
    )
    simulation.refuse_sweeper(config, None)


@pytest.mark.processes
def test_the_example_as_one_rank_of_65536(tmp_path: Path) -> None:
    size, manual = 65536, (ROOT / "docs/simulate.md").read_text()
    [command] = re.findall(r"^\$ python examples/train.py (.*simulate.world_size=65536.*)$", manual, re.MULTILINE)
    words = [*command.split(), "hydra.run.dir=."]
    outcome = run(python(TRAIN, *words), tmp_path, deadline=150, env=clean_environment())
    assert outcome.code == 0, outcome.text
    assert "simulating rank 37 of 65536" in outcome.text
    peak = re.search(r"held parameters 66\.\d KiB, .* peak of this process ([\d.]+) MiB", outcome.text)
    assert peak is not None, outcome.text
    assert float(peak[1]) < 2048
    record = yaml.safe_load((tmp_path / ".hydra/parallelism.yaml").read_text())
    assert record["simulated"] == {"rank": 37, "of": size}
    [row] = record["ranks"]
    assert (row["rank"], row["dp_replicate"], row["dp_shard"], row["dp_rank"]) == (37, 4, 5, 37)
    assert record["world"] == {
        "size": size, "nnodes": 8192, "launcher": "simulation", "source": f"parallelism.simulate.world_size={size}"
    }  # fmt: skip


@pytest.mark.processes
def test_a_sweep_of_worlds_runs_each_in_one_process(tmp_path: Path) -> None:
    words = ["parallelism.simulate.world_size=8,65536", "parallelism.dp_shard=-1", "batch=65536", "hydra.sweep.dir=."]
    outcome = run([*python("tell.py", "-m", warnings="default"), *words], tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    for job, size in enumerate((8, 65536)):
        record = yaml.safe_load((tmp_path / f"{job}/.hydra/parallelism.yaml").read_text())
        assert (record["simulated"], len(record["ranks"])) == ({"rank": 0, "of": size}, 1)
        assert record["degrees"]["dp_shard"] == size
        assert not (tmp_path / f"{job}/ranks").exists()


@pytest.mark.processes
def test_a_launch_beside_a_simulation_is_refused(tmp_path: Path) -> None:
    outcome = run(python("tell.py", "parallelism.simulate.world_size=8", "hydra.launcher.nproc_per_node=4"), tmp_path)
    assert (outcome.code, outcome.text) == (1, (
        "parallelism.simulate.world_size=8 needs one process for the whole world of 8, but hydra.launcher.nproc_per_node=4 "
        "asks for more\n  try: hydra.launcher.nproc_per_node=auto hydra.launcher.nnodes=1, or "
        "parallelism.simulate.world_size=null\n"
    ))  # fmt: skip
