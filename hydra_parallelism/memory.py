"""How much memory a job took at its peak: of its accelerator where it has one, of its process otherwise.

The number of a process is its resident set (code, libraries and all), so it compares layouts rather than models.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["attach", "peak", "read", "reset"]

_RESET_PEAK = "5"
"""What to write to ``/proc/self/clear_refs`` for the high-water mark to start again, see proc(5)."""


def reset(device_type: str) -> None:
    """Start counting anew: several jobs may run in one process, one after the other."""
    if device_type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def peak(device_type: str) -> int:
    """Bytes at the peak since :func:`reset`."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return _peak_of_process()


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def attach(job_return: Any, by_rank: Sequence[int]) -> None:
    """Note peaks on Hydra's ``JobReturn``, with which they travel to the sweep under every launcher."""
    job_return.peak_memory = list(by_rank)


def read(job_return: Any) -> list[int]:
    """What :func:`attach` has noted, in bytes by rank; empty where it has not."""
    return list(getattr(job_return, "peak_memory", []))
