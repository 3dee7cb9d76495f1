"""How far a sweep is: one line kept up to date on a terminal, one plain line for each event elsewhere.

A terminal shows, in place::

    job 3 of 7, 2 running, 1 failed, 42 s, about 90 s more: parallelism.tp_size=2

Whoever prints something else there calls :meth:`Progress.clear` first. Elsewhere (a file, a pipe)::

    [2/7] parallelism.tp_size=2: started
    [2/7] parallelism.tp_size=2: ok in 12.3 s (1 failed, 3 left, about 40 s more)

Nothing here can fail a sweep: a stream that is missing, closed or full is left alone. Threads may share an object.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from .outcome import Status
from .ranking import one_line

__all__ = ["Progress", "duration"]

_WIDTH_UNKNOWN = 80


@dataclass
class _Running:
    """A job that has been started."""

    place: int
    label: str
    began: float


class Progress:
    """Counts the jobs of a sweep and says so."""

    def __init__(
        self, total: int, stream: TextIO | None, clock: Callable[[], float] = time.monotonic, width: int | None = None
    ) -> None:
        """Start counting.

        Args:
            total: Number of jobs, those that are skipped included.
            stream: Where to write; ``None`` stays silent.
            clock: Seconds that only grow.
            width: Columns of the terminal; ``None`` asks it each time.
        """
        self._total, self._stream, self._clock, self._width = total, stream, clock, width
        self._in_place = _is_terminal(stream)
        self._began = clock()
        self._running: dict[int, _Running] = {}
        self._seen = 0
        self._seconds: list[float] = []
        self._finished = self._failed = self._skipped = 0
        self._most = 1
        self._shown = 0
        self._lock = threading.RLock()

    def start(self, job: int, label: str) -> None:
        """A job starts."""
        with self._lock:
            running = self._enter(job, label)
            self._most = max(self._most, len(self._running))
            self._tell(f"{self._front(running)}: started")

    def finish(self, job: int, status: Status) -> None:
        """A job has ended; one that never started may, too (its config was refused)."""
        with self._lock:
            known = job in self._running
            running = self._running[job] if known else self._enter(job, f"job {job}")
            del self._running[job]
            seconds = self._clock() - running.began
            if known:
                self._seconds.append(seconds)
            self._finished += 1
            self._failed += status is not Status.ok
            took = f" in {duration(seconds)}" if known else ""
            counts = [f"{self._failed} failed"] if self._failed else []
            counts += [f"{self._left()} left", *self._more()] if self._left() else []
            tail = f" ({', '.join(counts)})" if counts else ""
            self._tell(f"{self._front(running)}: {status.words}{took}{tail}")

    def skip(self, job: int, label: str) -> None:
        """A job need not run: an earlier sweep has its result."""
        with self._lock:
            running = self._enter(job, label)
            del self._running[job]
            self._skipped += 1
            self._tell(f"{self._front(running)}: has a result, skipped")

    def refresh(self) -> None:
        """Bring the line of a terminal up to the present moment. Elsewhere nothing."""
        with self._lock:
            if self._in_place:
                text = self._line()[: max(self._columns() - 1, 0)]  # the last column would wrap on some terminals
                self._write(f"\r{text.ljust(self._shown)}")
                self._shown = len(text)

    def clear(self) -> None:
        """Take the line away, so that something else can be printed. Elsewhere nothing."""
        with self._lock:
            if self._shown:
                self._write(f"\r{' ' * self._shown}\r")
                self._shown = 0

    def _enter(self, job: int, label: str) -> _Running:
        self._seen += 1
        self._running[job] = _Running(self._seen, one_line(label) or f"job {job}", self._clock())
        return self._running[job]

    def _front(self, running: _Running) -> str:
        return f"[{running.place}/{self._total}] {running.label}"

    def _tell(self, line: str) -> None:
        if self._in_place:
            self.refresh()
        else:
            self._write(f"{line}\n")

    def _line(self) -> str:
        counts = {"running": len(self._running), "failed": self._failed, "skipped": self._skipped}
        parts = [f"job {self._seen} of {self._total}", *(f"{count} {name}" for name, count in counts.items() if count)]
        parts += [duration(self._clock() - self._began), *self._more()]
        names = ", ".join(running.label for running in self._running.values())
        return ", ".join(parts) + (f": {names}" if names else "")

    def _left(self) -> int:
        """Jobs that have not ended."""
        return max(self._total - self._finished - self._skipped, 0)

    def _more(self) -> list[str]:
        """How long it may still take: the mean of the jobs so far for each that is left, as many at a time as so far."""
        if not self._seconds or not self._left():
            return []
        mean, now = sum(self._seconds) / len(self._seconds), self._clock()
        under_way = [max(mean - (now - running.began), 0.0) for running in self._running.values()]
        work = mean * (self._left() - len(under_way)) + sum(under_way)
        return [f"about {duration(round(work / min(self._most, self._left())))} more"]

    def _columns(self) -> int:
        if self._width is not None:
            return self._width
        try:
            assert self._stream is not None
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH_UNKNOWN
        except (OSError, ValueError, AttributeError):
            return _WIDTH_UNKNOWN

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def duration(seconds: float) -> str:
    """Seconds for people: ``12.3 s``, ``90 s``, ``12 min``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds != int(seconds) else f"{seconds:.0f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (ValueError, AttributeError):  # closed, or no stream at all
        return False
