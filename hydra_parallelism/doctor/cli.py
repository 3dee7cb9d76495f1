"""The subcommand ``doctor``."""

import argparse
import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from .findings import Level, collect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .findings import Finding

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Add the subcommand to those of ``hydra-parallelism``."""
    parser = commands.add_parser(
        "doctor", description="look at this machine and environment, run an all-reduce over local processes, say what is wrong"
    )
    parser.add_argument("--processes", type=_positive(int), default=2, metavar="N", help="of the all-reduce (default: 2)")
    parser.add_argument(
        "--deadline", type=_positive(float), default=120.0, metavar="S", help="seconds that it may take (default: 120)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Print the findings as they come.

    Returns:
        Exit status: 1 when something is bad, 0 otherwise.
    """
    counts = dict.fromkeys(Level, 0)
    for finding in _examine(parsed.processes, parsed.deadline):
        counts[finding.level] += 1
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{counts[Level.bad]} bad, {counts[Level.warn]} to look at\n")
    return 1 if counts[Level.bad] else 0


def _examine(processes: int, deadline: float) -> "Iterator[Finding]":
    from . import rehearsal, software, surroundings

    yield from collect(software.versions, software.plugin, software.accelerators, software.backends)
    yield from collect(surroundings.launchers, surroundings.meeting_place, surroundings.names)
    yield from collect(surroundings.limits, surroundings.strangers)
    meet = partial(rehearsal.all_reduce, processes, deadline)
    meet.__name__ = "the all-reduce"  # type: ignore[attr-defined]
    yield from collect(meet)


def _positive(kind: type) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
        return value

    return read
