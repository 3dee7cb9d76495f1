"""What ``hydra/sweeper=layouts`` adds to Hydra's basic sweeper: 200 jobs of one process that do nothing, interleaved.

Both sweeps use Hydra's basic launcher, in whose one process the jobs run one after the other, so the difference of the whole
commands is what planning, ``results.csv``, the progress lines, the table and the picture cost. CPU time (user + system) stands
beside wall time, which on a shared machine varies by more than the difference.

Usage: ``python benchmarks/layouts.py [ROUNDS] [JOBS]``.
"""

import os
import platform
import resource
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


def cost(command: list[str], cwd: Path) -> dict[str, float]:
    """Seconds that a command takes, on the wall and of the CPU."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "CPU": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


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
        taken: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, command in ways.items():
                taken[way].append(cost([*command, f"hydra.sweep.dir={way}{number}"], folder))
    print(f"{rounds} interleaved rounds of {jobs} jobs, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"Hydra {hydra.__version__}")  # fmt: skip
    for kind in ("wall", "CPU"):
        each = {way: [found[kind] * 1000 / jobs for found in costs] for way, costs in taken.items()}
        added = [ours - basic for ours, basic in zip(each["layouts"], each["basic"], strict=True)]
        for way, values in [*each.items(), ("added", added)]:
            print(f"{kind:>5} {way:>8}: {statistics.median(values):6.1f} ms a job ({' '.join(f'{v:.1f}' for v in values)})")


if __name__ == "__main__":
    main()
