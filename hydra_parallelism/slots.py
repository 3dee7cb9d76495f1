"""Devices and process slots for jobs that run at the same time."""

import contextlib
import os
import threading
from collections.abc import Iterator

from .errors import LaunchError
from .world import count_accelerators

__all__ = ["Slots"]


class Slots:
    """A pool: accelerators when there are any, else as many process slots as there are cores.

    Args:
        cpu_slots: Slots on a machine without accelerators; ``None`` is one for each core.
        largest: Processes of the largest job, which gets its turn on any CPU machine.
    """

    def __init__(self, cpu_slots: int | None, largest: int) -> None:
        found = count_accelerators()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._are_devices = found > 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        names = chosen.split(",")[:found] if chosen else [str(number) for number in range(found)]
        self._free = names if found else [str(n) for n in range(max(cpu_slots or cores, largest))]
        self._total = len(self._free)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, processes: int, stop: threading.Event) -> Iterator[str | None]:
        """Wait for slots, hold them, give them back.

        Yields:
            The value of ``CUDA_VISIBLE_DEVICES`` for the job, ``None`` without accelerators.

        Raises:
            LaunchError: There are fewer accelerators than the job has processes.
        """
        if processes > self._total:
            raise LaunchError(f"the job needs {processes} accelerators, but {self._total} are visible")
        with self._changed:
            while len(self._free) < processes and not stop.is_set():
                self._changed.wait(0.1)
            mine, self._free = self._free[:processes], self._free[processes:]
        try:
            yield ",".join(mine) if self._are_devices else None
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()
