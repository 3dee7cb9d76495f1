"""``hydra-parallelism plan``: what it says of a layout on a machine, and that it says so without torch."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from omegaconf import OmegaConf

from hydra_parallelism import ConfigurationError, Topology, mesh
from hydra_parallelism.plan import cli, text
from hydra_parallelism.plan.composition import Case, compose, resolve_case
from hydra_parallelism.plan.machine import MACHINES, MachineConfig, read_machine
from hydra_parallelism.plan.placement import communicators, stays_inside
from hydra_parallelism.plan.report import report, runs
from hydra_parallelism.topology import AXES, resolve
from processes import run
from test_topology_properties import layouts

PLAN = [sys.executable, "-W", "error", "-m", "hydra_parallelism.plan", "plan"]

TWO_NODES = """\
dp_replicate=2 * dp_shard=4 * tp=2 = 16 ranks on 2 nodes of 8
8 shares of each batch; parameters in 4 shards (2 copies); each layer over 2 ranks

resolved degrees: axes of the world, outermost first; what they make together; what experts see
  pp  dp_replicate  dp_shard  cfg  ring  ulysses  tp  dp  cp  fsdp  dp_cp  efsdp  ep
  1   2             4         1    1     1        2   8   1   4     8      8      1

the grid of ranks, tp innermost
  dp_replicate  dp_shard  ranks along tp  node
  0             0         0-1             0
  0             1         2-3             0
  0             2         4-5             0
  0             3         6-7             0
  1             0         8-9             1
  1             1         10-11           1
  1             2         12-13           1
  1             3         14-15           1

groups of rank 9, which is on node 1 and reads share 4 of 8
  axis          size  ranks      nodes  all groups of the axis
  dp_replicate  2     1, 9       0, 1   cross nodes
  dp_shard      4     9-15 by 2  1      stay inside a node
  tp            2     8, 9       1      stay inside a node
  dp            8     1-15 by 2  0, 1   cross nodes
  fsdp          4     9-15 by 2  1      stay inside a node
  dp_cp         8     1-15 by 2  0, 1   cross nodes
  efsdp         8     8-15       1      stay inside a node

communicators of rank 9; axes with the same ranks share one
  axes                            ranks      communicator     in the world
  none, but every job has it      0-15       the world's own  1
  pp, cfg, ring, ulysses, cp, ep  9          this rank alone  16
  dp_replicate                    1, 9       made for these   8
  dp_shard, fsdp                  9-15 by 2  made for these   4
  tp                              8, 9       made for these   8
  dp, dp_cp                       1-15 by 2  made for these   2
  efsdp                           8-15       made for these   2

gradients, in the order in which it happens
  of           operation       over          ranks
  all weights  reduce-scatter  fsdp          4
  all weights  all-reduce      dp_replicate  2

no warnings
"""


def case(*overrides: str) -> Case:
    return resolve_case(compose(overrides))


def facts(*overrides: str, of: int = 0) -> dict[str, Any]:
    return report(case(*overrides), of)


@pytest.mark.processes
def test_it_answers_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from hydra_parallelism.plan.cli import main\n"
        "status = main(['plan', 'parallelism=hsdp', 'world.nodes=16', 'world.per_node=8'])\n"
        "print('LOADED', status, [name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    outcome = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert outcome.text.startswith("dp_replicate=16 * dp_shard=8 = 128 ranks on 16 nodes of 8\n")
    assert "LOADED 0 []" in outcome.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_refusal_is_a_message_and_a_status(tmp_path: Path) -> None:
    outcome = run([*PLAN, "parallelism.tp_size=3", "parallelism.dp_shard=-1", "world.nodes=4"], tmp_path)
    assert outcome.code == 1
    assert outcome.text == (
        "parallelism does not fit the world:\n"
        "  pp_size=1 * dp_replicate=1 * dp_shard=-1 * cfg_parallel=1 * ring_degree=1 * ulysses_degree=1 * tp_size=3: dp_shard "
        "takes what is left, but the others multiply to 3 and world.nodes=4 * world.per_node=8 = 32: 32 % 3 = 2\n"
        "  try: parallelism.tp_size=2, or start 30 or 33 processes\n"
    )


def test_the_text_of_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism.dp_replicate=2", "parallelism.dp_shard=4", "parallelism.tp_size=2", "world.nodes=2"]
    assert cli.main(["plan", *words, "--of", "9", "--format", "text"]) == 0
    assert capsys.readouterr().out == TWO_NODES


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism.pp_size=2", "parallelism.dp_shard=2", "parallelism.tp_size=2", "--of", "5"]
    assert cli.main(["plan", *words, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == facts(*words[:3], of=5)
    assert cli.main(["plan", *words, "--format", "text"]) == 0
    assert capsys.readouterr().out == text.show(told) + "\n"
    assert cli.main(["plan", *words, "--format", "rich"]) == 0
    shown = capsys.readouterr().out
    assert all(each["axis"] in shown for each in told["axes"])


def test_a_machine_is_as_large_as_the_degrees_need() -> None:
    assert (case("parallelism.dp_shard=32").machine.nodes, case("parallelism.dp_shard=4").machine.nodes) == (4, 1)
    assert case("parallelism=fsdp").topology.dp_shard == 8
    assert case("parallelism=fsdp", "world=pcie", "world.nodes=3").topology.dp_shard == 12
    assert case("parallelism=hsdp", "world.nodes=3").topology == Topology(dp_replicate=3, dp_shard=8)
    assert case("parallelism.dp_shard=-1", "parallelism.world_size=24").machine.nodes == 3
    assert case("world.nodes=2").topology == Topology(dp_replicate=16)  # untouched degrees are DDP


def test_whoever_launched_this_process_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert case("parallelism=hsdp", "world.nodes=4").topology == Topology(dp_replicate=4, dp_shard=8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["world.nodes=0"], "world is not valid:\n  world.nodes=0: must be above 0"),
        (
            ["world.inter_us=-1", "world.per_node=0"],
            "world.per_node=0: must be above 0\n  world.inter_us=-1.0: must be above 0",
        ),
        (
            ["parallelism.world_size=12", "world.nodes=1"],
            "parallelism.world_size=12, but world.nodes=1 * world.per_node=8 = 8\n"
            "  try: world.nodes=2, or parallelism.world_size=8",
        ),
        (
            ["parallelism.dp_shard=16", "world.nodes=1"],
            "= 16, but world.nodes=1 * world.per_node=8 = 8\n  try: parallelism.dp_shard=8",
        ),
        (["world.efficiency=nan"], "world.efficiency=nan: must be a number above 0"),
        (["world.inter_us=inf"], "world.inter_us=inf: must be a number above 0"),
        (["++world.foo=1"], "world is not valid:\n  world.foo: no such key"),
        (["hydra.launcher.nnodes=0"], "hydra.launcher.nnodes=0: must be a whole number of at least 1"),
        (["world.nodes=1000000000"], "= 8000000000: plans are of at most 1,048,576 ranks\n  try: a smaller layout"),
        (["parallelism.dp_shard=99999999999"], "(product of the degrees): plans are of at most 1,048,576 ranks"),
        (["parallelism=null"], "parallelism=null: a plan needs the node parallelism\n  try: parallelism=default"),
        (["~world"], "~world: a plan needs the node world\n  try: world=dgx_h100"),
        (
            ["parallelism.simulate.world_size=64"],
            "parallelism.simulate.world_size=64 makes a job one rank of a world; a plan is of all of them\n"
            "  try: parallelism.simulate.world_size=null parallelism.world_size=64",
        ),
    ],
)
def test_refusals(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        case(*overrides)
    assert message in str(error.value)


def test_words_that_say_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "++model.foo=1"]) == 1
    assert capsys.readouterr().err == "model is not valid:\n  model.foo: no such key\n"
    assert cli.main(["plan", "--output", ""]) == 1
    assert capsys.readouterr().err.startswith("--output : no format has the suffix (none)")
    assert cli.main(["plan", "--format", "svg", "--colour", ""]) == 1
    assert "axis" in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_plan", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_rank_outside_the_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "parallelism=fsdp", "--of", "8"]) == 1
    assert capsys.readouterr().err == "rank 8 is outside the world of 8 rank(s)\n"


def test_configs_of_an_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "parallelism").mkdir()
    (tmp_path / "parallelism/mine.yaml").write_text("defaults: [fsdp_tp, _self_]\ntp_size: 4\n")
    assert cli.main(["plan", "--config-dir", str(tmp_path), "parallelism=mine", "--format", "text"]) == 0
    assert capsys.readouterr().out.startswith("dp_shard=2 * tp=4 = 8 ranks")
    assert cli.main(["plan", "--config-dir", str(tmp_path / "no"), "parallelism=mine"]) == 1
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", MACHINES)
def test_presets_of_machines(name: str) -> None:
    numbers, source = MACHINES[name]
    assert vars(OmegaConf.to_object(compose([f"world={name}"]).world)) == vars(MachineConfig(**numbers))
    assert source


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["parallelism.tp_size=16", "parallelism.dp_shard=2"],
         "tp groups straddle nodes: tp=16 ranks on nodes of 8, and every layer waits for them; try parallelism.tp_size=8"),
        (["parallelism.tp_size=2", "parallelism.context_parallel.ulysses_degree=8", "world.nodes=2"],
         "ulysses groups straddle nodes: ulysses=8 * tp=2 ranks on nodes of 8, and every layer waits for them; "
         "try parallelism.context_parallel.ulysses_degree=4"),
        (["parallelism.dp_replicate=2", "parallelism.dp_shard=16"],
         "shards cross nodes although there are replicas (fsdp=16 on nodes of 8); "
         "try parallelism.dp_shard=8 parallelism.dp_replicate=4"),
        (["parallelism.tp_size=4"],
         "dp_replicate=1 * dp_shard=1: all 4 ranks read the same batch and nothing is sharded by FSDP; "
         "try parallelism.dp_shard=-1 on more of them"),
        (["parallelism.dp_shard=12", "world.nodes=2"],
         "4 of world.nodes=2 * world.per_node=8 = 16 accelerators are unused: the degrees multiply to 12; "
         "a job started on all of them would be refused"),
    ],
)  # fmt: skip
def test_warnings(overrides: list[str], warning: str) -> None:
    assert facts(*overrides)["warnings"] == [warning]


@pytest.mark.parametrize("overrides", [["parallelism=hsdp", "world.nodes=4"], ["parallelism=fsdp"], ["parallelism.dp_shard=4"]])
def test_no_warnings(overrides: list[str]) -> None:
    assert facts(*overrides)["warnings"] == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallelism=single"], []),
        (["parallelism=ddp"], [("all weights", "all-reduce", "dp_replicate", 8)]),
        (["parallelism.cfg_parallel=2", "parallelism.dp_shard=2", "parallelism.inference=true"], []),
        (
            ["parallelism.dp_replicate=2", "parallelism.dp_shard=4", "parallelism.ep_size=2"],
            [
                ("all but experts", "reduce-scatter", "fsdp", 4),
                ("experts", "reduce-scatter", "efsdp", 2),
                ("all weights", "all-reduce", "dp_replicate", 2),
            ],
        ),
        (
            ["parallelism.tp_size=2", "parallelism.dp_shard=2", "parallelism.enable_sequence_parallel=true"],
            [("weights that tp does not split", "all-reduce", "tp", 2), ("all weights", "reduce-scatter", "fsdp", 2)],
        ),
    ],
)
def test_who_reduces_gradients(overrides: list[str], expected: list[tuple[Any, ...]]) -> None:
    assert [tuple(each.values()) for each in facts(*overrides)["gradients"]] == expected


@given(layouts())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_an_axis_stays_inside_nodes_when_all_its_groups_do(layout: tuple[dict[str, Any], int]) -> None:
    degrees, world = layout
    nested = {name: degrees.pop(name) for name in ("ring_degree", "ulysses_degree")}
    topology = resolve({**degrees, "context_parallel": nested, "inference": True}, world)
    for per_node in (1, 2, 3, 8):
        for axis in AXES:
            whole = all(len({rank // per_node for rank in group}) == 1 for group in topology.groups(axis))
            assert stays_inside(topology, axis, per_node) == whole, (axis, per_node)


@pytest.mark.parametrize("rank", [0, 13])
@pytest.mark.parametrize(
    "topology",
    [Topology(dp_replicate=2, dp_shard=4, tp=2, ep=4), Topology(pp=2, ring=2, ulysses=2, dp_shard=2), Topology(tp=16)],
)
def test_communicators_are_those_that_are_made(topology: Topology, rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=16)
    try:
        groups = mesh.build_groups(topology, rank, timeout=timedelta(seconds=60))
        made = [tuple(dist.get_process_group_ranks(group)) for group in groups.made]
        found = communicators(topology, rank)
        assert [each.ranks for each in found if each.kind != "default"] == made
        assert [each.ranks for each in found if each.kind == "default"] == [tuple(range(16))]
        of_axis = {axis: each.ranks for each in found for axis in each.axes}
        assert of_axis == {axis: tuple(dist.get_process_group_ranks(groups.of_axis[axis])) for axis in AXES}
    finally:
        dist.destroy_process_group()


def test_a_large_world_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallelism.tp_size=8", "parallelism.dp_shard=8", "parallelism.dp_replicate=-1", "world.nodes=8192"]
    assert cli.main(["plan", *words, "--of", "65535", "--format", "text"]) == 0
    told = capsys.readouterr().out
    assert "= 65,536 ranks on 8,192 nodes of 8" in told
    assert "... 8,183 rows" in told  # of 8,192: eight, and the last one, which the rank is in
    assert told.endswith("no warnings\n")
    assert len(told.splitlines()) < 60
    assert max(map(len, told.splitlines())) < 140


def test_numbers_as_runs() -> None:
    assert runs([3]) == [[3, 3, 1]]
    assert runs([0, 1, 2, 8, 9, 10]) == [[0, 2, 1], [8, 10, 1]]
    assert runs([1, 9, 17]) == [[1, 17, 8]]
    assert text.spell(runs([0, 1, 2, 8, 16])) == "0-2, 8, 16"


def test_a_link_is_the_slowest_on_the_way() -> None:
    machine = read_machine(MachineConfig(nodes=2), 16)
    assert machine.link((0, 7)) == machine.intra
    assert machine.link((7, 8)) == machine.inter
    assert (machine.inter.bytes_per_s, machine.intra.latency_s) == (50e9, pytest.approx(3.4e-6))
