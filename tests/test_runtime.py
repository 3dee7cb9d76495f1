"""init, current, shutdown, parallel_context: one process here, several through torchrun."""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize
from omegaconf import OmegaConf

import hydra_parallelism as hp
from hydra_parallelism import device
from hydra_parallelism._compat import registered_groups
from hydra_parallelism.config import DeviceType
from hydra_parallelism.world import World
from processes import body_lines, run, torchrun

VERSION: dict[str, Any] = {"version_base": None} if hydra.__version__.startswith("1.3") else {}


def listening_addresses() -> set[str]:
    """Hexadecimal local addresses at which this process listens, from the kernel's tables."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor of the listing itself
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def test_one_process_without_environment() -> None:
    hook = sys.excepthook
    with hp.parallel_context(hp.ParallelismConfig(dp_shard=-1)) as context:
        assert hp.current() is context
        assert context.topology == hp.Topology()
        assert (context.rank, context.local_rank, context.dp_rank, context.dp_world_size) == (0, 0, 0, 1)
        assert context.coordinate == dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp"), 0)
        assert context.device.type == "cpu" or torch.cuda.is_available()
        total = torch.ones(1)
        dist.all_reduce(total, group=context.mesh["fsdp"].get_group())
        assert total.item() == 1
        loopback = {"0100007F", "00000000000000000000000001000000"}
        assert listening_addresses() <= loopback
    assert registered_groups() == 0
    assert sys.excepthook is hook
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_current_says_why_there_is_none() -> None:
    with pytest.raises(hp.ParallelismError, match="no parallel context: choose a preset"):
        hp.current()


def test_current_raises_the_failure_of_the_start_again() -> None:
    with pytest.raises(hp.ConfigurationError) as first:
        hp.init({"dp_shard": 0})
    with pytest.raises(hp.ConfigurationError) as again:
        hp.current()
    assert again.value is first.value
    hp.shutdown()
    with pytest.raises(hp.ParallelismError, match="no parallel context"):
        hp.current()


def test_only_one_context_at_a_time() -> None:
    with hp.parallel_context({}) as context:
        with pytest.raises(hp.ParallelismError, match="alive already"):
            hp.init({})
        assert hp.current() is context


def test_the_block_may_fail() -> None:
    with pytest.raises(ZeroDivisionError), hp.parallel_context({}):
        raise ZeroDivisionError
    assert registered_groups() == 0
    hp.shutdown()


def test_a_refused_inner_context_leaves_the_outer_one() -> None:
    with hp.parallel_context({}) as outer:
        with pytest.raises(hp.ParallelismError, match="alive already"), hp.parallel_context({}):
            pass
        assert hp.current() is outer
        assert dist.is_initialized()


def test_the_task_may_destroy_the_groups_itself() -> None:
    with hp.parallel_context({}):
        dist.destroy_process_group()
    assert registered_groups() == 0


def test_values_from_elsewhere_in_the_config() -> None:
    config = OmegaConf.create({"minutes": 2, "plan": {"a": "colwise"}, "parallelism": {
        "tp_plan": "${plan}", "runtime": {"timeout_s": "${minutes}", "device_type": "cpu"}
    }})  # fmt: skip
    with pytest.warns(UserWarning, match="tp_plan is set but does nothing"):
        context = hp.init(config.parallelism)
    assert context.device.type == "cpu"
    options = context.mesh["tp"].get_group()._get_backend(torch.device("cpu")).options
    assert options._timeout.total_seconds() == 2
    hp.shutdown()


@pytest.mark.parametrize(
    ("runtime", "text"),
    [
        ({"timeout_s": 0}, "parallelism.runtime.timeout_s=0.0: must be a number of seconds between 0 and"),
        ({"timeout_s": float("nan")}, "parallelism.runtime.timeout_s=nan: must be"),
        ({"start_timeout_s": float("inf")}, "parallelism.runtime.start_timeout_s=inf: must be"),
        ({"timeout_s": "abc"}, "parallelism.runtime.timeout_s"),
        ({"backend": "nonsense"}, "parallelism.runtime.backend=nonsense: torch has no backend 'nonsense' here, it has"),
        ({"foo": 1}, "parallelism.runtime.foo"),
        ({"device_type": "tpu"}, "parallelism.runtime.device_type"),
    ],
)
def test_runtime_options_are_judged_before_anything_is_built(runtime: dict[str, Any], text: str) -> None:
    with pytest.raises(hp.ConfigurationError) as caught:
        hp.init({"runtime": runtime})
    assert text in str(caught.value)
    assert not dist.is_initialized()
    hp.shutdown()


def test_strings_in_a_dataclass_are_what_they_say() -> None:
    config = hp.ParallelismConfig(runtime=hp.RuntimeConfig(device_type="cpu"))  # type: ignore[arg-type]
    with hp.parallel_context(config) as context:
        assert context.device.type == "cpu"
    with pytest.raises(hp.ConfigurationError, match=r"parallelism\.fsdp\.nope: no such key"):
        hp.init({"fsdp": {"nope": 1}})
    hp.shutdown()


def test_many_cycles_leave_nothing() -> None:
    for _ in range(3):
        with hp.parallel_context({"tp_size": -1}):
            pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with hp.parallel_context({"tp_size": -1}):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before


def test_compose_api_twice() -> None:
    for preset, degree in (("fsdp", -1), ("tp", 1)):
        with initialize(config_path="apps/conf", **VERSION):
            config = compose("say", overrides=[f"parallelism={preset}"])
        with hp.parallel_context(config.parallelism) as context:
            assert context.topology.world_size == 1
        assert config.parallelism.dp_shard == degree


def test_too_many_processes_for_one() -> None:
    with pytest.raises(hp.LaunchError, match="parallelism asks for 4 processes"):
        hp.init({"dp_replicate": 2, "tp_size": 2})
    hp.shutdown()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_options_that_do_nothing_are_said() -> None:
    with (
        pytest.warns(UserWarning, match="tp_plan is set but does nothing at tp_size=1"),
        hp.parallel_context({"tp_plan": {"head": "colwise"}}),
    ):
        pass
    with (
        pytest.warns(FutureWarning, match="write parallelism.ep_size=1"),
        hp.parallel_context(hp.ParallelismConfig(enable_expert_parallel=True)),
    ):
        pass


def test_cuda_on_a_machine_without() -> None:
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(hp.ConfigurationError, match=r"runtime.device_type=cuda, but torch .* sees no CUDA device"):
        hp.init(OmegaConf.create({"runtime": {"device_type": "cuda"}}))
    hp.shutdown()


def test_the_device_is_the_local_rank() -> None:
    fifth_of_two_nodes = World(size=8, rank=5, local_rank=1, local_size=4, nnodes=2, sources={"local_rank": "LOCAL_RANK=1"})
    assert device.choose_index(fifth_of_two_nodes, 8) == 1
    assert device.choose_index(fifth_of_two_nodes, 1) == 0  # the launcher shows each task its one GPU
    last = World(size=8, rank=7, local_rank=7, local_size=8, sources={"local_rank": "LOCAL_RANK=7"})
    with pytest.raises(hp.LaunchError, match="LOCAL_RANK=7, but only 4 CUDA devices are visible"):
        device.choose_index(last, 4)


def test_backends() -> None:
    assert device.choose_backend(None, "cpu") == "gloo"
    assert device.choose_backend(None, "cuda") == "cpu:gloo,cuda:nccl"
    assert device.choose_backend("ucc", "cuda") == "ucc"
    assert device.choose_type(DeviceType.cpu, "parallelism") == "cpu"


@pytest.mark.processes
def test_three_jobs_in_one_set_of_processes(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "cycles.py"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert body_lines(outcome) == sorted(f"BODY job {job} left 0 groups" for job in range(3) for _ in range(4))


@pytest.mark.processes
def test_a_default_group_of_the_users_own_stays(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "owner.py"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert body_lines(outcome) == sorted(f"BODY rank {rank} 16 2 groups" for rank in range(4) for _ in range(2))


@pytest.mark.processes
def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "late.py"), tmp_path, deadline=60)
    assert outcome.code != 0
    assert "waited 3 s for the other ranks: 3 of 4 (WORLD_SIZE=4 (torchrun)) arrived" in outcome.text
