"""One line of the doctor."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

__all__ = ["Finding", "Level", "bad", "collect", "ok", "warn", "within"]

_T = TypeVar("_T")


class Level(Enum):
    """How much it matters."""

    ok = "ok"
    warn = "warn"
    bad = "bad"


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it."""

    level: Level
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level.value:<5} {self.text}"
        return f"{line}; try: {self.remedy}" if self.remedy else line


def ok(text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.ok, text)


def warn(text: str, remedy: str) -> Finding:
    """Something that will matter in some runs."""
    return Finding(Level.warn, text, remedy)


def bad(text: str, remedy: str) -> Finding:
    """Something that keeps runs from working."""
    return Finding(Level.bad, text, remedy)


def collect(*checks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of some checks, one after the other; a check that breaks is a finding itself."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a doctor that dies tells nothing
            said = str(error).strip().splitlines() or [""]
            yield bad(f"{check.__name__} could not be looked at: {type(error).__name__}: {said[0]}", "repair that first")


def within(seconds: float, function: Callable[[], _T]) -> _T | None:
    """What a function gives, or ``None`` when it fails or takes longer: name look-ups may hang for minutes."""
    found: list[_T] = []

    def call() -> None:
        try:
            found.append(function())
        except (OSError, UnicodeError):
            return

    thread = threading.Thread(target=call, daemon=True, name="hydra_parallelism doctor")
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
