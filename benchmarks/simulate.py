"""What it takes to be one rank of a large world: time and memory of the training example.

    python benchmarks/simulate.py

The first row is the same run as a real world of one process. CPU seconds are user and system time of the whole process, torch's
import and two training steps included; the target at 65,536 ranks is 10 s and 2 GB.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).parent.parent / "examples/train.py"
_RANK = 37
_LAYOUTS = {
    "hsdp": ("parallelism=hsdp",),
    "fsdp_tp": ("parallelism=fsdp_tp", "parallelism.dp_shard=4", "parallelism.dp_replicate=-1"),
    "pp_fsdp": ("parallelism=pp_fsdp", "parallelism.dp_shard=4", "parallelism.dp_replicate=-1"),
    "usp": ("parallelism=usp", "parallelism.context_parallel.ring_degree=2", "parallelism.dp_replicate=-1"),
}


def measure(*words: str) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and MiB at the peak of one run."""
    with tempfile.TemporaryDirectory() as folder:
        began = os.times()
        child = subprocess.Popen([sys.executable, TRAIN, *words, "train.steps=2"], cwd=folder, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"failed: {' '.join(words)}")
    return usage.ru_utime + usage.ru_stime, os.times().elapsed - began.elapsed, usage.ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    print(f"{'layout':8} {'ranks':>6} {'CPU s':>6} {'wall s':>7} {'MiB':>6}")
    print(f"{'real':8} {1:6,} {'{:6.1f} {:7.1f} {:6.0f}'.format(*measure('parallelism=hsdp'))}")
    for size in (65536, 1024, 8):
        for name, words in _LAYOUTS.items():
            simulate = (f"parallelism.simulate.world_size={size}", f"parallelism.simulate.rank={min(_RANK, size - 1)}")
            cpu, wall, peak = measure(*words, *simulate, f"train.batch_size={2 * size}")
            print(f"{name:8} {size:6,} {cpu:6.1f} {wall:7.1f} {peak:6.0f}", flush=True)


if __name__ == "__main__":
    main()
