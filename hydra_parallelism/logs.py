"""One log for each rank, one console for the job.

Rank 0 keeps the console and Hydra's own log handlers; every rank writes ``ranks/<rank>.log`` below the output folder, each line
with its rank and mesh coordinate. What other ranks print (file descriptors 1 and 2) goes to their log too, unless
``runtime.log_ranks`` gives them the console.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigurationError

__all__ = ["RankLog", "console_ranks", "flush"]

_FORMAT = "[%(asctime)s][{who}][%(name)s][%(levelname)s] - %(message)s"


def console_ranks(value: Any, world_size: int, key: str) -> set[int]:
    """Ranks that write to the console: ``all``, or a list of ranks.

    Raises:
        ConfigurationError: Neither, or a rank that does not exist.
    """
    if value == "all":
        return set(range(world_size))
    ranks = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        found = {int(rank) for rank in ranks}
    except (TypeError, ValueError):
        found = {-1}
    if not found <= set(range(world_size)):
        raise ConfigurationError(f"{key}.runtime.log_ranks={value}: must be 'all' or ranks between 0 and {world_size - 1}")
    return found


class RankLog:
    """The log of this rank, from :meth:`open` to :meth:`close`."""

    def __init__(self, folder: Path, rank: int, world_size: int, coordinate: Mapping[str, int], console: set[int]) -> None:
        place = " ".join(f"{axis}={index}" for axis, index in coordinate.items())
        self.path = folder / "ranks" / f"{rank}.log"
        self.rank, self.who = rank, place or f"one of {world_size}"
        self._console = console
        self._formatter = logging.Formatter(_FORMAT.format(who=f"rank {rank}{f' {place}' if place else ''}"))
        self._handler: logging.FileHandler | None = None
        self._saved: list[tuple[int, int]] = []

    def open(self) -> None:
        """Add the log, and take the console from a rank that has none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        root = logging.getLogger()
        if self.rank != 0:
            _drop_files(root)  # Hydra's own job log belongs to rank 0
        self._handler = logging.FileHandler(self.path)
        self._handler.setFormatter(self._formatter)
        if self.rank not in self._console:
            _drop_streams(root)
            self.take_streams()
        elif self._console != {0}:
            for handler in _streams(root):
                handler.setFormatter(self._formatter)
        root.addHandler(self._handler)

    def take_streams(self) -> None:
        """Send what is printed from here on to the log, whoever prints it."""
        if self._saved:
            return
        flush()
        target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._saved = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._saved:
            os.dup2(target, number)
        os.close(target)

    def give_streams_back(self) -> None:
        """Undo :meth:`take_streams`."""
        flush()
        for number, kept in self._saved:
            os.dup2(kept, number)
            os.close(kept)
        self._saved = []

    def write_to_console(self, text: str) -> None:
        """Write to the console that this rank had when the log was opened."""
        flush()
        os.write(self._saved[1][1] if self._saved else 2, f"{text}\n".encode())

    def close(self) -> None:
        """Close the log; the streams stay where they are."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


def _streams(logger: logging.Logger) -> list[logging.Handler]:
    return [h for h in logger.handlers if type(h) is logging.StreamHandler]


def _drop_streams(logger: logging.Logger) -> None:
    for handler in _streams(logger):
        logger.removeHandler(handler)


def _drop_files(logger: logging.Logger) -> None:
    for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()


def flush() -> None:
    """Flush what Python has of the two streams; either may be missing or closed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
