"""What torch's elastic agent does not see to while it watches the ranks of a launch."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from .worker import read_pid, start_time

__all__ = ["Census"]


class Census:
    """Watches beside the agent for what it does not see to.

    It remembers the forked processes of a launch: the agent reports one failed process, whichever it meets first. And it ends
    the ones that stay when another has failed: the agent gives them half a minute then, whatever its time limit.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self._folder, self._patience = folder, patience
        self._earlier = set(folder.glob("*"))  # a log_dir of the user's own keeps what other runs left
        self._failed_since: dict[Path, float] = {}
        self._seen: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="hydra_parallelism census").start()

    def __exit__(self, *exception: object) -> None:
        self._over.set()

    def attempts(self) -> list[Path]:
        """The agent's folders of this launch, one for each start of the ranks, in order."""
        runs = [path for path in self._folder.glob("*") if path not in self._earlier]
        found = [path for run in runs for path in run.glob("attempt_*")]
        return sorted(found, key=lambda path: int(path.name.removeprefix("attempt_")))

    def exitcodes(self) -> dict[int, int]:
        """Exit code by rank, of those forked processes that have ended."""
        codes: dict[int, int] = {}
        for attempt in self.attempts():
            for path in attempt.glob("*/pid"):
                process = self._seen.get(read_pid(path)[0])
                if process is not None and process.exitcode is not None:
                    codes[int(path.parent.name)] = process.exitcode
        return codes

    def _watch(self) -> None:
        from ._compat import child_processes

        while not self._over.wait(0.05):
            self._seen |= {child.pid: child for child in child_processes() if child.pid is not None}
            for attempt in self.attempts():
                if any(attempt.glob("*/error.json")):
                    since = self._failed_since.setdefault(attempt, time.monotonic())
                    if time.monotonic() - since > self._patience:
                        _kill_those_of(attempt)


def _kill_those_of(attempt: Path) -> None:
    for path in attempt.glob("*/pid"):
        pid, began = read_pid(path)
        if began and began == start_time(pid):  # still the process that wrote it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
