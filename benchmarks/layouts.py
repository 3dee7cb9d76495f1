"""What ``hydra/sweeper=layouts`` adds to Hydra's basic sweeper: 200 jobs of one process that do nothing, interleaved.

Both sweeps use Hydra's basic launcher, in whose one process the jobs run one after the other, so the difference of the whole
commands is what planning, ``results.csv``, the progress lines, the table and the picture cost.

Usage: ``python benchmarks/layouts.py [ROUNDS] [JOBS]``.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hydra

APP = """
import hydra
kw = ({"version_base": None} if hydra.__version__.startswith("1.3")
      else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]})

@hydra.main(config_path="conf", config_name="config", **kw)
def main(config):
    return float(config.x)

if __name__ == "__main__":
    main()
"""
CONFIG = "defaults:\n  - parallelism: default\n  - _self_\nx: 0\n"


def seconds(command: list[str], cwd: Path) -> float:
    """Wall time of a command."""
    began = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print medians and the difference for each job."""
    rounds, jobs = (int(argument) for argument in (sys.argv[1:] + ["5", "200"][len(sys.argv) - 1 :])[:2])
    front = [sys.executable, "app.py", "-m", "hydra/launcher=basic", f"x=range({jobs})"]
    ways = {"basic": front, "layouts": [*front, "hydra/sweeper=layouts"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conf").mkdir()
        (folder / "conf/config.yaml").write_text(CONFIG)
        (folder / "app.py").write_text(APP)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, command in ways.items():
                taken[way].append(seconds([*command, f"hydra.sweep.dir={way}{number}"], folder) * 1000 / jobs)
    print(f"{rounds} interleaved rounds of {jobs} jobs, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"Hydra {hydra.__version__}")  # fmt: skip
    for way, found in taken.items():
        each = " ".join(f"{value:.1f}" for value in found)
        print(f"{way:>8}: {statistics.median(found):.1f} ms a job ({each})")
    added = [ours - basic for ours, basic in zip(taken["layouts"], taken["basic"], strict=True)]
    print(f"   added: {statistics.median(added):.1f} ms a job, ratio "
          f"{statistics.median(taken['layouts']) / statistics.median(taken['basic']):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
