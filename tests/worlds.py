"""One start of processes for each world size, which all test files share: starting takes longer than most of what is tested.

What a world does is listed in tests/apps (``layouts``, ``pipelines``, ``jobs``) and done by tests/apps/world.py.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from apps import attend, foreign, jobs, layouts, pipelines
from processes import Outcome, python, run

DEADLINE = 1200
"""Seconds for a world, and for the test that happens to start it (and those before it): several times what they take."""

MARKS = [
    pytest.mark.processes,
    pytest.mark.engines,
    pytest.mark.timeout(DEADLINE),
    pytest.mark.xdist_group("worlds"),  # one process holds what has been started
]

_BEFORE: dict[int, tuple[int, ...]] = {1: (), 4: (1,), 2: (4,), 8: (2,), 3: ()}
"""World size -> those whose checkpoints it reads."""


@cache
def folder() -> Path:
    """Where the worlds write, for this session."""
    holder = tempfile.TemporaryDirectory(prefix="worlds")
    _kept.append(holder)
    return Path(holder.name)


_kept: list[Any] = []


def work(size: int) -> dict[str, list[Any]]:
    """Piece of work -> its arguments, in order."""
    pieces: dict[str, Any] = {"resume": jobs.RESUME, "norms": jobs.NORMS, "pipelines": pipelines.CASES, "branches": jobs.GUIDED}
    found = {"parity": [size]}
    found |= {"observe": [size]} if size in layouts.OBSERVED else {}
    found |= {name: [by_size[size]] for name, by_size in pieces.items() if size in by_size}
    found |= {"attention": [size]} if size in attend.LAYOUTS else {}
    found |= {"native": [size]} if size in foreign.NATIVE else {}
    found |= {"refusals": [], "context": []} if size == 2 else {}
    return found | ({"llamas": [], "fuzz": list(jobs.FUZZ), "others": []} if size == 4 else {})


def reports(size: int) -> list[dict[str, Any]]:
    """What each rank of a world tells: piece of work -> its report."""
    for other in _BEFORE[size]:
        reports(other)
    outcome = start(size)
    assert outcome.code == 0, outcome.text[-8000:]
    return _read(size)


@cache
def start(size: int) -> Outcome:
    """Run a world, once, whether it fails or not."""
    command = python("world.py", str(size), json.dumps(work(size)), warnings="default")
    try:
        return run(command, folder(), deadline=DEADLINE)
    except AssertionError as error:
        return Outcome(str(error), -1, DEADLINE)


@cache
def _read(size: int) -> list[dict[str, Any]]:
    return [json.loads((folder() / f"world{size}-rank{rank}.json").read_text()) for rank in range(size)]
