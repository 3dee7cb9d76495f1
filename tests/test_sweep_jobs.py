"""hydra/launcher=torchrun: the jobs of a sweep, each on fresh processes of its own number."""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import ROOT, Outcome, body_lines, clean_environment, python, run, start
from test_launch import alive, gone_within

pytestmark = pytest.mark.processes

TRAIN = ROOT / "examples/train.py"
TWO = ("parallelism=fsdp", "hydra.launcher.nproc_per_node=2", "hydra.sweep.dir=sweep")


def final_losses(outcome: Outcome) -> list[float]:
    assert outcome.code == 0, outcome.text
    return [float(loss) for loss in re.findall(r"step 10/10 loss (\d+\.\d+)", outcome.text)]


def jobs_started(outcome: Outcome) -> list[int]:
    """Processes of each job, as the launcher announces them."""
    return [int(count) for count in re.findall(r"\t#\d+ .*: (\d+) process\(es\)", outcome.text)]


def test_each_job_has_the_processes_its_degrees_ask_for(tmp_path: Path) -> None:
    few = ("train.steps=10", "train.log_every=10", "hydra.sweep.dir=sweep")
    outcome = run([sys.executable, TRAIN, "-m", "parallelism=fsdp", "parallelism.dp_shard=1,2,4", *few], tmp_path)
    assert jobs_started(outcome) == [1, 2, 4]
    losses = final_losses(outcome)
    assert len(losses) == 3
    assert max(losses) - min(losses) < 1e-4
    assert len(list(tmp_path.glob("sweep/2/ranks/*.log"))) == 4
    assert (tmp_path / "sweep/1/.hydra/parallelism.yaml").exists()


def test_presets_may_be_swept(tmp_path: Path) -> None:
    few = ("train.steps=10", "train.log_every=10", "hydra.launcher.nproc_per_node=2")
    outcome = run([sys.executable, TRAIN, "-m", "parallelism=ddp,fsdp", *few], tmp_path)
    assert jobs_started(outcome) == [2, 2]
    losses = final_losses(outcome)
    assert len(losses) == 2
    assert abs(losses[0] - losses[1]) < 1e-4
    assert not (tmp_path / "outputs").exists()


def test_a_failed_job_does_not_sink_the_sweep(tmp_path: Path) -> None:
    outcome = run(python("fate.py", "-m", *TWO, "rank=1", "fate=none,raise,kill,exit", warnings="default"), tmp_path)
    assert outcome.code == 1
    assert jobs_started(outcome) == [2, 2, 2, 2]
    assert len(body_lines(outcome)) == 4
    summary = outcome.text.split("1 of 4 jobs succeeded, 3 failed:\n")[1]
    assert re.search(r"#1 .*fate=raise: ValueError: boom-1\n\t\tin \S*sweep/1\n", summary)
    assert re.search(r"#2 .*fate=kill: rank 1 of 2 on \S+ \(dp_shard=1\) was killed by SIGKILL", summary)
    assert re.search(r"#3 .*fate=exit: rank 1 of 2 on \S+ \(dp_shard=1\) left with exit code 3, without", summary)
    assert "its log: " in summary
    assert "Terminating process" not in outcome.text


def test_a_job_that_does_not_fit_fails_without_being_started(tmp_path: Path) -> None:
    outcome = run(python("fate.py", "-m", *TWO, "parallelism.tp_size=1,3", "rank=9"), tmp_path)
    assert outcome.code == 1
    assert jobs_started(outcome) == [2]
    assert "others multiply to 3 and hydra.launcher.nproc_per_node=2" in outcome.text


def test_jobs_share_no_process(tmp_path: Path) -> None:
    outcome = run(python("fate.py", "-m", *TWO, "value=1,2", "parallelism.runtime.log_ranks=all"), tmp_path)
    assert outcome.code == 0, outcome.text
    pids = re.findall(r"pid (\d+)", outcome.text)
    assert len(pids) == len(set(pids)) >= 2


def test_cached_resolvers_agree_within_a_job(tmp_path: Path) -> None:
    outcome = run(python("fate.py", "-m", *TWO, "value=1,2", "+at='${now:%f}'", "+copy='${at}'"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert len({p.name for p in tmp_path.glob("sweep/*") if p.is_dir()}) == 2


SWEPT = """
import os
import hydra
kw = ({"version_base": None} if hydra.__version__.startswith("1.3")
      else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]})
leaked = []

@hydra.main(config_path=None, **kw)
def main(config):
    leaked.append(1)
    assert "LEAKED" not in os.environ
    assert len(leaked) == 1
    os.environ["LEAKED"] = "1"
    os.write(1, f"BODY x {config.x}\\n".encode())
    return config.x

main()
"""


def test_a_script_without_a_guard_and_without_a_preset(tmp_path: Path) -> None:
    """State of one job is not seen by the next, and main() at module level starts no sweep within the sweep."""
    (tmp_path / "app.py").write_text(SWEPT)
    outcome = run([sys.executable, "app.py", "-m", "hydra/launcher=torchrun", "+x=1,2,3"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert body_lines(outcome) == ["BODY x 1", "BODY x 2", "BODY x 3"]


VALUES = """
import dataclasses, sys, threading
import hydra
kw = ({"version_base": None} if hydra.__version__.startswith("1.3")
      else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]})

@dataclasses.dataclass
class Mine:
    loss: float

@hydra.main(config_path=None, **kw)
def main(config):
    if config.how == "mine":
        return Mine(0.5)
    if config.how == "lock":
        return threading.Lock()
    if config.how == "zero":
        sys.exit(0)

if __name__ == "__main__":
    main()
"""


def test_what_a_task_returns_need_not_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(VALUES)
    outcome = run([sys.executable, "app.py", "-m", "hydra/launcher=torchrun", "+how=mine,lock,zero"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert "the job returns None to the sweep: its lock cannot be sent" in outcome.text
    assert outcome.text.count("cannot be sent") == 1


def test_parallel_jobs_overlap_within_the_slots(tmp_path: Path) -> None:
    options = ("hydra.launcher.max_parallel_jobs=3", "hydra.launcher.cpu_slots=4", "hydra.sweep.dir=sweep")
    degrees = ("parallelism=fsdp", "parallelism.dp_shard=2,4", "value=1,2")
    outcome = run(python("fate.py", "-m", *options, *degrees, "seconds=2", "rank=9"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert sorted(jobs_started(outcome)) == [2, 2, 4, 4]
    stamps = {}
    for number in range(4):
        text = (tmp_path / f"sweep/{number}/ranks/0.log").read_text()
        moments = re.findall(r"^\[\d+-\d+-\d+ (\d+):(\d+):(\d+),(\d+)\]", text, re.MULTILINE)
        seconds = [int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in moments]
        stamps[number] = (seconds[0], seconds[-1] + 2)
    small = [stamps[0], stamps[1]]
    assert max(begin for begin, _ in small) < min(end for _, end in small), "two jobs of 2 fit into 4 slots together"
    large = [stamps[2], stamps[3]]
    assert large[0][1] <= large[1][0] + 0.5 or large[1][1] <= large[0][0] + 0.5, "two jobs of 4 do not"


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_ctrl_c_ends_a_sweep(at_a_time: int, tmp_path: Path) -> None:
    marker = f"+marker={tmp_path.name}"
    options = (f"hydra.launcher.max_parallel_jobs={at_a_time}", "hydra.launcher.cpu_slots=4", "fate=sleep", "value=1,2,3")
    process = start(python("fate.py", "-m", *TWO, *options, marker), tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("BODY"):
            break
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 130, text
    assert gone_within(5, marker), alive(marker)
    assert "the sweep was ended by SIGINT" in text
    assert "Traceback" not in text


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short: a socket has to fit into it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def test_thirty_jobs_leave_nothing(tmp_path: Path, temporary: Path) -> None:
    marker = f"+marker={tmp_path.name}"
    watch = tmp_path / "watch.py"
    watch.write_text(
        "import resource, runpy, sys\n"
        "from hydra_parallelism import multirun\n"
        "run = multirun._run\n"
        "def watched(*arguments):\n"
        "    run(*arguments)\n"
        "    pages = int(open('/proc/self/statm').read().split()[1])\n"
        "    print('RSS', pages * resource.getpagesize() // 1024, len(__import__('os').listdir('/proc/self/fd')), flush=True)\n"
        "multirun._run = watched\n"
        "sys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    values = f"value={','.join(map(str, range(30)))}"
    script = python("fate.py", "-m", *TWO, values, marker)
    outcome = run([sys.executable, watch, *script[3:]], tmp_path, env=clean_environment(TMPDIR=str(temporary)), deadline=150)
    assert outcome.code == 0, outcome.text
    seen = [(int(rss), int(files)) for rss, files in re.findall(r"RSS (\d+) (\d+)", outcome.text)]
    assert len(seen) == 30
    assert seen[-1][0] - seen[4][0] < 8 * 1024, f"kB after each job: {seen}"
    assert seen[-1][1] <= seen[4][1] + 1, f"open files after each job: {seen}"
    assert gone_within(5, marker), alive(marker)
    assert [path.name for path in temporary.iterdir() if "inductor" not in path.name] == []  # torch's own cache stays


def test_a_killed_sweep_leaves_no_process(tmp_path: Path) -> None:
    marker = f"+marker={tmp_path.name}"
    process = start(python("fate.py", "-m", *TWO, "fate=sleep", marker), tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("BODY"):
            break
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", line)]
    process.kill()
    process.communicate(timeout=10)
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.skipif(find_spec("optuna") is None, reason="hydra-optuna-sweeper is not installed (no release for Hydra 1.4)")
def test_optuna_sees_the_value_of_rank_0(tmp_path: Path) -> None:
    command = python("fate.py", "-m", *TWO, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1",
                     "rank=9", "value=choice(1,2,3,4)", "hydra.sweeper.study_name=s", warnings="ignore")  # fmt: skip
    outcome = run(command, tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    values = [int(value) for value in re.findall(r"value (\d+)$", outcome.text, re.MULTILINE)]
    assert len(values) == 4
    results = (tmp_path / "sweep/optimization_results.yaml").read_text()
    assert f"best_value: {min(values)}.0" in results
    for number in range(4):
        logs = [path.read_text() for path in (tmp_path / f"sweep/{number}/ranks").iterdir()]
        assert len(logs) == 2


@pytest.mark.skipif(find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed (no release for Hydra 1.4)")
def test_submitit_local(tmp_path: Path) -> None:
    command = [sys.executable, TRAIN, "-m", "parallelism=fsdp", "hydra/launcher=submitit_local", "train.steps=2"]
    outcome = run([*command, "hydra.launcher.tasks_per_node=4", "hydra.sweep.dir=sweep"], tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    folders = [path for path in tmp_path.glob("sweep/*") if path.is_dir() and path.name != ".submitit"]
    assert [path.name for path in folders] == ["0"]
    assert len(list(folders[0].glob("ranks/*.log"))) == 4
    assert "dp_shard=4 = 4 process(es) (SUBMITIT_LOCAL_NTASKS=4 (submitit))" in (folders[0] / "ranks/0.log").read_text()
