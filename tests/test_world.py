"""Who launched this process: every launcher's variables as they are really set, and what is refused."""

from typing import Any

import pytest

from hydra_parallelism import ConfigurationError, LaunchError, resolve
from hydra_parallelism._equation import Degrees, read_degrees
from hydra_parallelism.world import Launcher, World, count_accelerators, plan, read

TORCHRUN = {
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "9",
    "ROLE_WORLD_SIZE": "16",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
SBATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_NTASKS": "4",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_LOCALID": "3",
    "SUBMITIT_LOCAL_GLOBALID": "3",
    "SUBMITIT_LOCAL_JOB_ID": "4242",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}


def _read(environ: dict[str, str], **changes: str | None) -> World:
    world = read({name: value for name, value in {**environ, **changes}.items() if value is not None})
    assert world is not None
    return world


def _numbers(world: World) -> tuple[int, int, int, int, int, int]:
    """Size, rank, local rank, local size, number of nodes, node."""
    return world.size, world.rank, world.local_rank, world.local_size, world.nnodes, world.node_rank


def _refusal(environ: dict[str, str], **changes: str | None) -> str:
    with pytest.raises(LaunchError) as caught:
        _read(environ, **changes)
    return str(caught.value)


# --- every launcher


def test_nobody() -> None:
    assert read({}) is None
    assert read({"PATH": "/bin", "MASTER_ADDR": "n1", "LOCAL_RANK": "1"}) is None


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read() == read(TORCHRUN)


def test_torchrun_on_two_nodes() -> None:
    world = _read(TORCHRUN)
    assert _numbers(world) == (16, 9, 1, 8, 2, 1)
    assert world.launcher is Launcher.torchrun
    assert world.launched


def test_torchrun_with_unequal_nodes() -> None:
    world = _read(TORCHRUN, WORLD_SIZE="3", RANK="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert _numbers(world) == (3, 2, 0, 1, 2, 1)


def test_one_process_under_torchrun_is_launched() -> None:
    changes = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = _read(TORCHRUN, **changes, GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    assert _numbers(world) == (1, 0, 0, 1, 1, 0)
    assert world.launched


def test_torch_variables_set_by_hand() -> None:
    world = _read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert _numbers(world) == (4, 3, 1, 2, 2, 1)
    assert world.launcher is Launcher.environment
    assert world.source() == "WORLD_SIZE=4 (environment variables)"


def test_without_local_variables_each_process_has_a_machine_of_its_own() -> None:
    assert _numbers(_read({"RANK": "3", "WORLD_SIZE": "4"})) == (4, 3, 0, 1, 4, 3)


def test_a_local_rank_alone_means_one_machine() -> None:
    assert _numbers(_read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})) == (4, 3, 3, 4, 1, 0)


@pytest.mark.parametrize(
    ("rank", "local_rank", "node", "expected"),
    [
        (0, 0, 0, (4, 0, 0, 2, 2, 0)),
        (1, 1, 0, (4, 1, 1, 2, 2, 0)),
        (2, 0, 1, (4, 2, 0, 2, 2, 1)),
        (3, 1, 1, (4, 3, 1, 2, 2, 1)),
    ],
)
def test_slurm_step_on_two_nodes(rank: int, local_rank: int, node: int, expected: tuple[int, ...]) -> None:
    world = _read(SRUN, SLURM_PROCID=str(rank), SLURM_LOCALID=str(local_rank), SLURM_NODEID=str(node))
    assert _numbers(world) == expected
    assert world.launcher is Launcher.slurm


@pytest.mark.parametrize(
    ("rank", "local_rank", "node", "local_size"),
    [(0, 0, 0, 2), (1, 1, 0, 2), (2, 0, 1, 1)],
)
def test_slurm_step_with_unequal_nodes(rank: int, local_rank: int, node: int, local_size: int) -> None:
    counts = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NTASKS_PER_NODE": "2,1"}
    world = _read(SRUN, **counts, SLURM_PROCID=str(rank), SLURM_LOCALID=str(local_rank), SLURM_NODEID=str(node))
    assert _numbers(world) == (3, rank, local_rank, local_size, 2, node)


@pytest.mark.parametrize(("rank", "local_rank", "node"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_slurm_step_with_cyclic_placement(rank: int, local_rank: int, node: int) -> None:
    world = _read(SRUN, SLURM_PROCID=str(rank), SLURM_LOCALID=str(local_rank), SLURM_NODEID=str(node))
    assert _numbers(world) == (4, rank, local_rank, 2, 2, node)


@pytest.mark.parametrize(("rank", "local_rank", "node", "local_size"), [(0, 0, 0, 3), (1, 0, 1, 1), (2, 1, 0, 3), (3, 2, 0, 3)])
def test_slurm_step_with_cyclic_placement_on_unequal_nodes(rank: int, local_rank: int, node: int, local_size: int) -> None:
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node)}
    world = _read(SRUN, **place, SLURM_STEP_TASKS_PER_NODE="3,1")
    assert _numbers(world) == (4, rank, local_rank, local_size, 2, node)


@pytest.mark.parametrize(
    ("text", "node", "local_size"), [("4(x2),1", 1, 4), ("4(x2),1", 2, 1), ("1(x3)", 2, 1), ("2,1(x2)", 2, 1), ("4", 0, 4)]
)
def test_tasks_per_node_of_slurm(text: str, node: int, local_size: int) -> None:
    changes = {"SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_NUM_NODES": "3"}
    world = _read(SRUN, **changes, SLURM_PROCID="0", SLURM_NODEID=str(node), SLURM_STEP_TASKS_PER_NODE=text)
    assert world.local_size == local_size


def test_a_step_may_be_smaller_than_its_job() -> None:
    world = _read(SRUN, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_NUM_NODES="1", SLURM_STEP_TASKS_PER_NODE="1")
    assert _numbers(world) == (1, 0, 0, 1, 1, 0)
    assert world.source() == "SLURM_STEP_NUM_TASKS=1 (srun)"


def test_an_sbatch_script_is_not_a_launch() -> None:
    assert read(SBATCH) is None


def test_torchrun_under_srun_wins() -> None:
    world = _read({**SRUN, **TORCHRUN})
    assert world.launcher is Launcher.torchrun
    assert _numbers(world) == (16, 9, 1, 8, 2, 1)


def test_submitit_on_this_machine() -> None:
    world = _read(SUBMITIT)
    assert _numbers(world) == (4, 3, 3, 4, 1, 0)
    assert world.source() == "SUBMITIT_LOCAL_NTASKS=4 (submitit)"


def test_open_mpi() -> None:
    world = _read(OPEN_MPI)
    assert _numbers(world) == (4, 3, 1, 2, 2, 1)
    assert world.source("rank") == "OMPI_COMM_WORLD_RANK=3 (mpirun)"


def test_pmi() -> None:
    world = _read(PMI)
    assert _numbers(world) == (4, 2, 0, 2, 2, 1)
    assert world.source() == "PMI_SIZE=4 (PMI)"
    assert _numbers(_read(PMI, MPI_LOCALNRANKS=None, MPI_LOCALRANKID=None)) == (4, 2, 0, 1, 4, 2)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**PMI, **OPEN_MPI, **SUBMITIT, **SRUN, **TORCHRUN}, Launcher.torchrun),
        ({**PMI, **OPEN_MPI, **SUBMITIT, **SRUN}, Launcher.slurm),
        ({**PMI, **OPEN_MPI, **SUBMITIT}, Launcher.submitit),
        ({**PMI, **OPEN_MPI}, Launcher.open_mpi),
        (PMI, Launcher.pmi),
    ],
    ids=["torchrun", "slurm", "submitit", "open mpi", "pmi"],
)
def test_precedence(environ: dict[str, str], launcher: Launcher) -> None:
    assert _read(environ).launcher is launcher


def test_every_number_remembers_where_it_comes_from() -> None:
    torchrun, slurm = _read(TORCHRUN), _read(SRUN)
    names = ("size", "rank", "local_rank", "local_size", "nnodes", "node_rank")
    assert [torchrun.source(name) for name in names] == [
        "WORLD_SIZE=16 (torchrun)",
        "RANK=9 (torchrun)",
        "LOCAL_RANK=1 (torchrun)",
        "LOCAL_WORLD_SIZE=8 (torchrun)",
        "GROUP_WORLD_SIZE=2 (torchrun)",
        "GROUP_RANK=1 (torchrun)",
    ]
    assert [slurm.source(name) for name in names] == [
        "SLURM_STEP_NUM_TASKS=4 (srun)",
        "SLURM_PROCID=0 (srun)",
        "SLURM_LOCALID=0 (srun)",
        "SLURM_STEP_TASKS_PER_NODE=2(x2) (srun)",
        "SLURM_STEP_NUM_NODES=2 (srun)",
        "SLURM_NODEID=0 (srun)",
    ]
    assert _read({"RANK": "3", "WORLD_SIZE": "4"}).source("nnodes") == "nnodes=4 (environment variables)"


def test_a_topology_that_does_not_fit_quotes_the_variable() -> None:
    with pytest.raises(ConfigurationError, match=r"tp_size=3 = 3, but WORLD_SIZE=16 \(torchrun\)\n"):
        resolve({"tp_size": 3}, 16, source=_read(TORCHRUN).source())


# --- what is refused


def test_a_world_size_without_a_rank_is_refused() -> None:
    assert _refusal({"WORLD_SIZE": "8"}) == (
        "WORLD_SIZE=8 is set but RANK is not, so the place of this process is unknown\n"
        "  try: unset WORLD_SIZE, or start with torchrun"
    )


@pytest.mark.parametrize(
    ("environ", "missing", "text"),
    [
        (TORCHRUN, "WORLD_SIZE", "WORLD_SIZE is not set, although RANK is (torchrun)"),
        (SRUN, "SLURM_PROCID", "SLURM_PROCID is not set, although SLURM_STEP_ID is (srun)"),
        (
            SUBMITIT,
            "SUBMITIT_LOCAL_GLOBALID",
            "SUBMITIT_LOCAL_GLOBALID is not set, although SUBMITIT_LOCAL_NTASKS is (submitit)",
        ),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK is not set, although OMPI_COMM_WORLD_SIZE is (mpirun)"),
        (PMI, "PMI_RANK", "PMI_RANK is not set, although PMI_SIZE is (PMI)"),
    ],
)
def test_an_incomplete_environment_is_refused(environ: dict[str, str], missing: str, text: str) -> None:
    assert _refusal(environ, **{missing: None}) == text


def test_alternatives_are_both_named_when_neither_is_there() -> None:
    text = _refusal(SRUN, SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None)
    assert text == "SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set, although SLURM_STEP_ID is (srun)"
    assert _read(SRUN, SLURM_STEP_NUM_TASKS=None).source() == "SLURM_NTASKS=4 (srun)"


@pytest.mark.parametrize(
    ("environ", "name", "value", "launcher"),
    [
        (TORCHRUN, "WORLD_SIZE", "many", "torchrun"),
        (TORCHRUN, "LOCAL_RANK", "1.0", "torchrun"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "2x", "torchrun"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "two", "srun"),
        (SRUN, "SLURM_NODEID", "n1", "srun"),
        (PMI, "PMI_RANK", "0x1", "PMI"),
    ],
)
def test_what_is_no_number_is_refused(environ: dict[str, str], name: str, value: str, launcher: str) -> None:
    assert _refusal(environ, **{name: value}) == f"{name}={value!r} is not a number ({launcher})"


CONTRADICTION = "the launcher's variables contradict each other:\n  "


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": "16"}, "RANK=16 (torchrun) must be less than WORLD_SIZE=16 (torchrun)"),
        ({"LOCAL_RANK": "8"}, "LOCAL_RANK=8 (torchrun) must be less than LOCAL_WORLD_SIZE=8 (torchrun)"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2 (torchrun) must be less than GROUP_WORLD_SIZE=2 (torchrun)"),
        ({"LOCAL_WORLD_SIZE": "17"}, "LOCAL_WORLD_SIZE=17 (torchrun) must not be more than WORLD_SIZE=16 (torchrun)"),
        ({"RANK": "-1"}, "RANK=-1 (torchrun) must be at least 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 (torchrun) must be at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 (torchrun) must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "-8"}, "LOCAL_WORLD_SIZE=-8 (torchrun) must be at least 1"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 (torchrun) must be at least 1"),
        ({"GROUP_WORLD_SIZE": "0"}, "GROUP_WORLD_SIZE=0 (torchrun) must be at least 1"),
        ({"GROUP_RANK": "-1"}, "GROUP_RANK=-1 (torchrun) must be at least 0"),
    ],
)
def test_a_contradiction_is_refused(changes: dict[str, str], text: str) -> None:
    assert _refusal(TORCHRUN, **changes) == CONTRADICTION + text


def test_all_contradictions_are_told_at_once() -> None:
    assert _refusal(TORCHRUN, RANK="20", LOCAL_RANK="9") == CONTRADICTION + (
        "RANK=20 (torchrun) must be less than WORLD_SIZE=16 (torchrun)\n"
        "  LOCAL_RANK=9 (torchrun) must be less than LOCAL_WORLD_SIZE=8 (torchrun)"
    )


def test_a_world_of_no_processes_is_refused() -> None:
    assert _refusal({"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}) == (
        CONTRADICTION + "WORLD_SIZE=0 (environment variables) must be at least 1"
    )


def test_a_step_on_no_nodes_is_refused() -> None:
    assert "SLURM_STEP_TASKS_PER_NODE" in _refusal(SRUN, SLURM_STEP_TASKS_PER_NODE="2(x0)")


# --- the planned world


def _degrees(**config: Any) -> Degrees:
    return read_degrees(config, "parallelism")


@pytest.mark.parametrize(
    ("config", "options", "size", "source"),
    [
        ({}, {}, 1, "world_size=1 (product of the degrees)"),
        ({"dp_shard": 2, "tp_size": 3}, {}, 6, "world_size=6 (product of the degrees)"),
        ({"dp_shard": -1, "tp_size": 3}, {}, 3, "world_size=3 (product of the degrees that are not -1)"),
        ({"dp_shard": -1}, {}, 1, "world_size=1 (product of the degrees that are not -1)"),
        ({"dp_shard": -1}, {"nproc_per_node": 4}, 4, "hydra.launcher.nproc_per_node=4"),
        ({"dp_shard": 2}, {"nproc_per_node": 4}, 4, "hydra.launcher.nproc_per_node=4"),
        ({"dp_shard": -1, "world_size": 12}, {}, 12, "parallelism.world_size=12"),
        ({"dp_shard": -1, "world_size": 12}, {"nproc_per_node": 4}, 12, "parallelism.world_size=12"),
    ],
)
def test_how_many_processes_a_config_asks_for(config: dict[str, Any], options: dict[str, int], size: int, source: str) -> None:
    world = plan(_degrees(**config), **options, environ=NO_DEVICES)
    assert (world.size, world.source()) == (size, source)
    assert (world.rank, world.local_rank, world.nnodes, world.node_rank) == (0, 0, 1, 0)
    assert world.local_size == size
    assert world.launcher is Launcher.nobody
    assert not world.launched


def test_processes_per_node_are_multiplied_by_nodes() -> None:
    world = plan(_degrees(dp_shard=-1), nproc_per_node=4, nnodes=2, environ=NO_DEVICES)
    assert (world.size, world.local_size, world.nnodes) == (8, 4, 2)


@pytest.mark.parametrize(("world_size", "nnodes"), [(1, 4), (6, 4)])
def test_a_plan_never_has_fewer_processes_than_it_says(world_size: int, nnodes: int) -> None:
    world = plan(_degrees(world_size=world_size), nnodes=nnodes, environ=NO_DEVICES)
    assert world.size == world_size
    assert world.local_size >= 1


@pytest.mark.skipif(count_accelerators({}) == 0, reason="no accelerator here")
def test_visible_accelerators_are_taken_when_the_rest_divides_them() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    assert plan(_degrees(dp_shard=-1), environ=one).source() == "world_size=1 (visible accelerators)"
    assert plan(_degrees(dp_shard=-1, tp_size=2), environ=one).size == 2
    assert plan(_degrees(dp_shard=-1), environ={}).size == count_accelerators({})


@pytest.mark.parametrize("hidden", ["", "-1", " ", ","])
def test_hidden_accelerators_do_not_count(hidden: str) -> None:
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": hidden}) == 0


def test_no_more_accelerators_count_than_are_there() -> None:
    present = count_accelerators({})
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": "0"}) == min(1, present)
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(64)))}) == present
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == (2 if present else 0)
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": "GPU-a"}) == min(1, present)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert read({"RANK": "", "WORLD_SIZE": ""}) is None
