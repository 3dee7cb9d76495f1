"""Seconds for each job of a sweep: 8 jobs of 2 gloo processes, each one all-reduce, started in three ways, interleaved.

* ours: ``python app.py -m hydra/launcher=torchrun``, fresh processes for each job, forked from a warm server
* loop: ``for i in ...; do torchrun --standalone --nproc-per-node 2 app.py; done``
* submitit: ``python app.py -m hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2`` (all jobs at once, as it does)

Usage: ``python benchmarks/sweeps.py [ROUNDS] [JOBS]``. Whole commands are timed, start of the parent and its torch included.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

APP = """
import hydra
kw = ({"version_base": None} if hydra.__version__.startswith("1.3")
      else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]})

@hydra.main(config_path="conf", config_name="config", **kw)
def main(config):
    import torch, torch.distributed as dist
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    return config.x

if __name__ == "__main__":
    main()
"""
CONFIG = "defaults:\n  - parallelism: ddp\n  - _self_\nx: 0\n"


def seconds(commands: list[list[str]], cwd: Path) -> float:
    """Wall time of commands, one after the other."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print medians and ratios."""
    rounds, jobs = (int(argument) for argument in (sys.argv[1:] + ["3", "8"][len(sys.argv) - 1 :])[:2])
    values = ",".join(map(str, range(jobs)))
    app = [sys.executable, "app.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "app.py"]
    ways = {
        "ours": [[*app, "-m", f"x={values}", "hydra.launcher.nproc_per_node=2"]],
        "loop": [[*torchrun, f"x={value}"] for value in range(jobs)],
    }
    if find_spec("submitit"):
        submitit = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
        ways["submitit"] = [[*app, "-m", f"x={values}", *submitit]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conf").mkdir()
        (folder / "conf/config.yaml").write_text(CONFIG)
        (folder / "app.py").write_text(APP)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, commands in ways.items():
                taken[way].append(seconds(commands, folder) / jobs)
    print(f"{rounds} interleaved rounds of {jobs} jobs x 2 processes, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, torch {torch.__version__}")  # fmt: skip
    median = {way: statistics.median(found) for way, found in taken.items()}
    for way, found in taken.items():
        each = " ".join(f"{value:.2f}" for value in found)
        print(f"{way:>9}: {median[way]:.2f} s a job ({each}), {median[way] / median['ours']:.1f} x ours")


if __name__ == "__main__":
    main()
