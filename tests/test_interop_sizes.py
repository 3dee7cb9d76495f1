"""Sizes to and from accelerate, torchtitan, diffusers, Lightning and Megatron-Core: against their own classes."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hydra_parallelism import ConfigurationError, ContextParallelConfig, ParallelismConfig, Topology, resolve
from hydra_parallelism.interop import (
    from_accelerate,
    from_diffusers,
    from_lightning,
    from_nemo,
    from_torchtitan,
    to_accelerate,
    to_diffusers,
    to_lightning,
    to_nemo,
    to_torchtitan,
    trainer_arguments,
)
from hydra_parallelism.world import World
from interop_rows import megatron, megatron_config
from processes import body_lines, python, run

pytestmark = pytest.mark.engines


@cache
def accelerate_class() -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig


@cache
def titan_class() -> Any:
    from torchtitan.distributed import ParallelDims

    return ParallelDims


@cache
def diffusers_class() -> Any:
    from diffusers import ContextParallelConfig

    return ContextParallelConfig


@cache
def lightning_class() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy


def sequences(ring: int = 1, ulysses: int = 1) -> ContextParallelConfig:
    return ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)


LIGHT: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any], list[ParallelismConfig]]] = {
    "accelerate": (
        to_accelerate,
        from_accelerate,
        accelerate_class,
        [
            ParallelismConfig(dp_replicate=2, dp_shard=4),
            ParallelismConfig(dp_shard=2, tp_size=2),
            ParallelismConfig(dp_replicate=2, dp_shard=2, tp_size=2, context_parallel=sequences(ring=2)),
            ParallelismConfig(dp_shard=2, context_parallel=sequences(ulysses=4)),
        ],
    ),
    "torchtitan": (
        to_torchtitan,
        from_torchtitan,
        titan_class,
        [
            ParallelismConfig(dp_replicate=2, dp_shard=4, world_size=8),
            ParallelismConfig(pp_size=2, dp_shard=2, tp_size=2, context_parallel=sequences(ring=2), world_size=16),
            ParallelismConfig(dp_shard=8, tp_size=2, ep_size=8, world_size=16),
        ],
    ),
    "diffusers": (
        to_diffusers,
        from_diffusers,
        diffusers_class,
        [ParallelismConfig(context_parallel=sequences(2, 4)), ParallelismConfig(context_parallel=sequences(ulysses=2))],
    ),
    "lightning": (
        to_lightning,
        from_lightning,
        lightning_class,
        [ParallelismConfig(dp_shard=4, tp_size=2), ParallelismConfig(tp_size=8)],
    ),
}
CASES = [pytest.param(name, config, id=f"{name}-{i}") for name, entry in LIGHT.items() for i, config in enumerate(entry[3])]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_their_class_takes_our_sizes_and_gives_them_back(name: str, config: ParallelismConfig, tmp_path: Path) -> None:
    to, back, kind, _ = LIGHT[name]
    given = to(config)
    assert back(kind()(**given)) == config
    assert back(given) == config
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(given))
    assert back(file) == config


@pytest.mark.parametrize("config", LIGHT["accelerate"][3])
def test_accelerate_derives_the_same_sizes(config: ParallelismConfig) -> None:
    theirs, ours = accelerate_class()(**to_accelerate(config)), resolved(config)
    assert theirs.total_size == ours.world_size
    assert theirs.data_parallel_size == ours.dp_world_size
    assert theirs.non_data_parallel_size == ours.cp * ours.tp


@pytest.mark.parametrize("config", LIGHT["torchtitan"][3])
def test_torchtitan_derives_the_same_sizes(config: ParallelismConfig) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    theirs, ours = titan_class()(**to_torchtitan(config), spmd_backend="partial_dtensor"), resolved(config)
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=ours.world_size)
    try:
        theirs.build_mesh()
        found = {name: mesh.size() for name, mesh in theirs.get_all_one_dimensional_meshes().items()}
        groups = {name: tuple(mesh.mesh.tolist()) for name, mesh in theirs.get_all_one_dimensional_meshes().items()}
    finally:
        dist.destroy_process_group()
    of_theirs = {"batch": "dp", "loss": "dp_cp"}
    assert found == {name: ours.size(of_theirs.get(name, name)) for name in found}
    assert groups == {name: ours.group(of_theirs.get(name, name), 5) for name in groups}
    assert {"batch", "fsdp"} <= set(found)
    assert ("ep" in found) == (ours.ep > 1)


NEMO = [
    (ParallelismConfig(dp_replicate=-1, tp_size=2, pp_size=2), 16, "dp_replicate"),
    (ParallelismConfig(dp_replicate=-1, tp_size=2, context_parallel=sequences(ring=2)), 16, "dp_replicate"),
    (ParallelismConfig(dp_replicate=-1, tp_size=2, enable_sequence_parallel=True), 8, "dp_replicate"),
    (ParallelismConfig(dp_replicate=-1, context_parallel=sequences(ulysses=4)), 8, "dp_replicate"),
    (ParallelismConfig(dp_replicate=-1, context_parallel=sequences(2, 2)), 8, "dp_replicate"),
    (ParallelismConfig(dp_shard=-1, tp_size=2, ep_size=8), 16, "dp_shard"),
]


@pytest.mark.parametrize(("config", "world_size", "data"), NEMO)
def test_megatron_takes_our_sizes_and_gives_them_back(config: ParallelismConfig, world_size: int, data: str) -> None:
    given = to_nemo(config, world_size=world_size, data=data)
    assert from_nemo(given, data=data) == config
    assert from_nemo(megatron_config(given), data=data) == config


@pytest.mark.parametrize(("config", "world_size", "data"), NEMO)
def test_megatron_puts_ranks_in_the_same_groups(config: ParallelismConfig, world_size: int, data: str) -> None:
    ours = resolve(config, world_size)
    given = to_nemo(config, world_size=world_size, data=data)
    tp, pp, cp = (given[f"{name}_size"] for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"))
    dense = megatron()[1](tp=tp, ep=1, dp=world_size // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for theirs, axis in (("tp", "tp"), ("cp", "cp"), ("dp", "dp"), ("dp-cp", "dp_cp"), ("pp", "pp")):
        assert sorted(dense.get_ranks(theirs)) == sorted(map(list, ours.groups(axis)))
    if ours.ep > 1:
        etp, ep = given["expert_tensor_parallel_size"], given["expert_model_parallel_size"]
        rest = world_size // (etp * ep * pp)
        experts = megatron()[1](tp=etp, ep=ep, dp=rest, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
        assert sorted(experts.get_ranks("ep")) == sorted(map(list, ours.groups("ep")))
        assert sorted(experts.get_ranks("dp")) == sorted(map(list, ours.groups("efsdp")))


def resolved(config: ParallelismConfig) -> Topology:
    c = config.context_parallel
    factors = (config.pp_size, config.dp_replicate, config.dp_shard, c.ring_degree, c.ulysses_degree, config.tp_size)
    size = 1
    for factor in factors:
        size *= factor
    return resolve(config, size)


REFUSED = [
    (to_accelerate, {"pp_size": 2}, "parallelism.pp_size=2: accelerate has no such axis\n    try: parallelism.pp_size=1"),
    (to_accelerate, {"dp_shard": 2, "fsdp": {"cpu_offload": True}}, "fsdp.cpu_offload=true: accelerate keeps it in Fully"),
    (to_accelerate, {"tp_size": 2, "tp_plan": {"a": "colwise"}}, "its models are split by their own plan\n    try: auto"),
    (
        to_accelerate,
        {"context_parallel": {"ring_degree": 2, "ulysses_degree": 2}},
        "has cp_size or sp_size, not both, but parallelism.context_parallel.ring_degree=2 and parallelism.context_parallel."
        "ulysses_degree=2\n  try: parallelism.context_parallel.ring_degree=4 parallelism.context_parallel.ulysses_degree=1",
    ),
    (
        to_accelerate,
        {"dp_replicate": 2, "tp_size": 2},
        "has no replicas without shards beside parallelism.tp_size=2: parallelism.dp_replicate=2, parallelism.dp_shard=1\n"
        "  try: parallelism.dp_replicate=1 parallelism.dp_shard=2",
    ),
    (to_torchtitan, {"cfg_parallel": 2, "inference": True}, "parallelism.cfg_parallel=2: torchtitan has no such axis"),
    (to_torchtitan, {"context_parallel": {"ulysses_degree": 2}}, "ulysses_degree=2: torchtitan's cp passes keys and values"),
    (to_torchtitan, {"activation_checkpointing": "full", "dp_shard": 2}, "activation_checkpointing=full: ParallelDims holds"),
    (to_diffusers, {"tp_size": 2}, "parallelism.tp_size=2: diffusers has no such axis beside context parallelism"),
    (to_diffusers, {"dp_replicate": 2}, "needs a ring_degree or ulysses_degree above 1, but parallelism.context_parallel has"),
    (to_lightning, {"dp_replicate": 2, "dp_shard": 2}, "parallelism.dp_replicate=2: ModelParallelStrategy has a data axis"),
    (
        to_nemo,
        {"dp_shard": 2},
        "parallelism.dp_shard=2: its data axis is what the other sizes leave of the world, read as dp_re",
    ),
    (to_nemo, {"dp_replicate": 2, "pipeline": {"schedule": "GPipe"}, "pp_size": 2}, "pipeline.schedule=GPipe: Megatron has"),
    (from_accelerate, {"dp_shard_size": 2, "sp_backend": "ours"}, "sp_backend='ours': a choice inside accelerate"),
    (from_accelerate, {"tp": 2}, "tp: ParallelismConfig has no such field"),
    (from_torchtitan, {"dp_shard": 2, "etp": 2}, "etp: ParallelDims has no such field; did you mean"),
    (from_torchtitan, {"dp_shard": 2, "world_size": "two"}, "world_size='two': must be a whole number of at least 1"),
    (from_diffusers, {"ring_degree": 2, "ulysses_anything": True}, "ulysses_anything=True: a choice inside diffusers"),
    (from_lightning, {"data_parallel_size": "auto"}, "data_parallel_size='auto': how many that is, Lightning says when it st"),
    (from_nemo, {"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size=2: here the schedule"),
    (
        from_nemo,
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
        "expert_tensor_parallel_size=2 (tensor_model_parallel_size=2 unless it is said) with expert_model_parallel_size=4: "
        "here a rank of ep holds whole experts\n    try: expert_tensor_parallel_size=1",
    ),
    (from_nemo, {"context_parallel_size": 4, "cp_comm_type": "all_gather"}, "cp_comm_type='all_gather', hierarchical_context"),
]


@pytest.mark.parametrize(("convert", "source", "says"), REFUSED)
def test_what_the_other_side_cannot_express_is_refused_by_name(convert: Callable[..., Any], source: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        convert(source)
    assert says in str(caught.value)


def test_what_accelerate_reads_from_the_environment_is_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(dp_shard=2)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert accelerate_class()(**to_accelerate(config)).tp_size == 1  # every size is said
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    to_accelerate(config)
    for name, value in (("USE_FSDP", "true"), ("USE_PARALLELISM_CONFIG", "true"), ("GRADIENT_ACCUMULATION_STEPS", "4")):
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
        with pytest.warns(
            UserWarning, match=rf"ACCELERATE_{name}={value} configures accelerate behind the config's back: .*\n"
        ):
            to_accelerate(config)
        monkeypatch.delenv(f"ACCELERATE_{name}")


def test_a_trainer_is_told_of_the_processes_that_are_there() -> None:
    assert trainer_arguments() == {"devices": 1, "num_nodes": 1}
    assert trainer_arguments(World(8, local_size=4, nnodes=2)) == {"devices": 4, "num_nodes": 2}
    with pytest.raises(ConfigurationError, match=r"devices=4 \* num_nodes=2 = 8, but size=7\n  try: start as many"):
        trainer_arguments(World(7, local_size=4, nnodes=2))


@pytest.mark.processes
def test_a_trainer_runs_in_our_processes_and_trains_as_one_does(tmp_path: Path) -> None:
    outcome = run(python("fit.py", "parallelism=fsdp", "parallelism.dp_shard=2", warnings="default"), tmp_path, deadline=150)
    lines = body_lines(outcome)
    assert len(lines) == 2, outcome.text
    places, losses = zip(*(line.split(": ") for line in lines))
    assert [place.split(maxsplit=2)[2] for place in places] == ["0 of 2", "1 of 2"]
    assert len({place.split()[1] for place in places}) == 1  # ours started both, and Lightning none
    for told in losses:
        assert [float(loss) for loss in told.split()] == pytest.approx(line_losses(), abs=2e-6)


def line_losses() -> list[float]:
    """What tests/apps/fit.py trains, in this process and without Lightning."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    torch.manual_seed(1)
    inputs, targets = torch.randn(16, 4), torch.randn(16, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for batch in (slice(0, 8), slice(8, 16)):
        loss = torch.nn.functional.mse_loss(layer(inputs[batch]), targets[batch])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
