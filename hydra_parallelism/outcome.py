"""What one job of a sweep came to: its status, the numbers that its task returned, and the row that holds them.

Nothing here imports torch: an error is judged by the names of its types, which is also all that is left of one that comes from
another process as text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from typing import Any

from ._equation import FACTORS
from .errors import ConfigurationError
from .failures import Failure, message_of, tell

__all__ = ["BACK", "COLUMNS", "DEGREES", "FRONT", "Row", "Status", "check_names", "numbers_of", "status_of"]

DEGREES = (*FACTORS, "ep_size")
"""The degrees of a row, outermost axis first: the factors of the world, and ``ep_size``."""

FRONT = ("job", "status", *DEGREES, "world_size")
BACK = ("seconds", "peak_memory_mib", "peak_memory_mib_per_rank", "folder", "error", "overrides", "fingerprint")
COLUMNS = (*FRONT, *BACK)
"""Columns that every file has; the numbers stand between ``world_size`` and ``seconds``."""


class Status(str, Enum):
    """How a job ended."""

    ok = "ok"
    failed = "failed"
    """It raised, or could not be started."""
    out_of_memory = "out_of_memory"
    """It raised because memory, of the device or of the host, ran out."""
    killed = "killed"
    """A rank ended without an exception: by a signal (the kernel's out-of-memory killer is one), or it left."""
    interrupted = "interrupted"
    """The sweep was stopped before the job was over."""

    def __str__(self) -> str:
        return self.value

    @property
    def words(self) -> str:
        """For people: ``out of memory``."""
        return self.value.replace("_", " ")


# The line that ends a traceback, also within an exception group. torch.OutOfMemoryError, numpy's _ArrayMemoryError.
_ACCOUNT = re.compile(r"^(?:[ |]*\| )?(?:\w+\.)*(\w+)(?:: (.*))?$", re.MULTILINE)
_WHO = re.compile(r"^rank \d+ of \d+ on .*$", re.MULTILINE)
_STATUS_OF_TYPE = {
    "OutOfMemoryError": Status.out_of_memory,
    "MemoryError": Status.out_of_memory,
    "_ArrayMemoryError": Status.out_of_memory,
    "KeyboardInterrupt": Status.interrupted,
    "Interrupted": Status.interrupted,
    "SystemExit": Status.killed,
    "UncompletedJobError": Status.killed,  # submitit's, of a job that left no result
}
# CUDA and the CPU allocator say so in an error of another type when it is not torch's caching allocator that fails.
_OUT_OF_MEMORY_TEXTS = ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_PRECEDENCE = (Status.out_of_memory, Status.interrupted, Status.killed)


def status_of(error: BaseException | None, text: str = "") -> Status:
    """Judge how a job ended from its error, without importing what raised it.

    The types in the error's chain count, and those that its text names: a rank's traceback arrives as text. A rank that ended
    without an exception was killed, whatever it had printed before.

    Args:
        error: What the job raised; ``None`` if it raised nothing, or if only the text is at hand.
        text: The account of the error; empty is the error's own message.
    """
    if error is None and not text:
        return Status.ok
    text = text or _message(error)
    who = _WHO.findall(text)
    if who and who[-1].endswith(", without an exception"):
        return Status.killed
    found = {_STATUS_OF_TYPE.get(kind, Status.failed) for kind in _types(error)}
    found |= {_judge(kind, message) for kind, message in _ACCOUNT.findall(text)}
    if "not started: the sweep was interrupted" in text:
        found.add(Status.interrupted)
    return next((status for status in _PRECEDENCE if status in found), Status.failed)


def _judge(kind: str, message: str) -> Status:
    if kind.endswith("Error") and any(text in message for text in _OUT_OF_MEMORY_TEXTS):
        return Status.out_of_memory
    return _STATUS_OF_TYPE.get(kind, Status.failed)


def _message(error: BaseException | None) -> str:
    """What an error says; of the failure of a rank its account, which the error itself does not repeat."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Failure):
        return tell(cause, cause.rank + 1, {}, None)
    return "" if error is None else f"{type(error).__name__}: {message_of(error)}"


def _types(error: BaseException | None) -> Iterator[str]:
    """Type names, base classes included, of an error and of those it follows from."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield from (kind.__name__ for kind in type(each).__mro__)
        todo += [each.__cause__, None if each.__suppress_context__ else each.__context__, *getattr(each, "exceptions", ())]


def numbers_of(value: Any) -> dict[str, float]:
    """The numbers that a task returned, by name.

    Args:
        value: A number (also one of numpy or torch, of no dimension), called ``objective``; a mapping of names to numbers; or
            ``None`` for a task that returns none.

    Raises:
        ConfigurationError: It is something else. Every offending entry is named.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        number = _number(value)
        if number is None:
            raise ConfigurationError(
                f"the task returns {_describe(value)}, which is no number\n"
                "  try: return a number, or a mapping of names to numbers, or nothing"
            )
        return {"objective": number}
    numbers = {name: _number(each) for name, each in value.items()}
    problems = [f"{name}: {_describe(value[name])}, which is no number" for name, number in numbers.items() if number is None]
    problems += check_names(numbers)
    if problems:
        raise ConfigurationError("\n  ".join(["the task returns a mapping that is not of names to numbers:", *problems]))
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> float | None:
    try:
        if not isinstance(value, Real) and getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        return float(value)
    except Exception:  # noqa: BLE001 - a whole number of more than 308 digits, a tensor without data, any class of the user's
        return None


def _describe(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - it is the user's method
        text = "one that cannot be shown"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_names(names: Iterable[Any]) -> list[str]:
    """What is wrong with the names of numbers, which become columns of ``results.csv``; empty when nothing is."""
    problems = []
    for name in names:
        if not isinstance(name, str) or not name:
            problems.append(f"{name!r} ({type(name).__name__}) cannot name a number: must be text")
        elif name in COLUMNS:
            problems.append(f"{name}: a column of results.csv has this name already; try: task_{name}")
    return problems


@dataclass(frozen=True)
class Row:
    """What one job came to."""

    job: int
    """Its number in the sweep that ran it."""
    fingerprint: str
    """Identifies the job's configuration: a job that is run again replaces its row."""
    status: Status
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Of :data:`DEGREES`, as resolved; empty when the job could not be laid out."""
    world: int | None = None
    """Number of processes."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the task returned, by name."""
    seconds: float | None = None
    """From the start of its processes to their end."""
    peak_memory: tuple[int, ...] = ()
    """Bytes, one for each rank; empty when not measured."""
    folder: str = ""
    error: str = ""
    """The line that says what happened."""
    overrides: str = ""
    """What tells the job from others, quoted as for a shell (``shlex.join``)."""
