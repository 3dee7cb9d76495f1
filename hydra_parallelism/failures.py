"""Errors on their way from a rank to the console: written by the rank, chosen and told by whoever started it.

A rank that fails writes torch elastic's error file (``TORCHELASTIC_ERROR_FILE``), in torch's own format. When one rank fails
its peers fail too, with errors of the network, and the agent ends the rest: :func:`find_cause` tells the cause from these.
"""

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ParallelismError

__all__ = ["Failure", "find_cause", "format_error", "message_of", "tell", "write_error_file"]

_ECHOES = ("DistBackendError", "DistNetworkError", "DistStoreError", "SignalException", "KeyboardInterrupt")
_ECHO_TEXTS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe", "NCCL error")
_TAIL_LINES = 15
QUITTER = "quitter"
"""The kind of account of a rank that leaves in the middle of its job: ``sys.exit``, where Python tells no callback."""
FOLLOWER = "follower"
"""The kind of account that a rank leaves when it stops because another one has told why already."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended."""

    rank: int
    exitcode: int
    text: str = ""
    """The rank's own account: a traceback, or a message that needs none. Empty when it left none."""
    kind: str = ""
    """Name of the exception class."""
    moment: float = float("inf")
    """When the rank wrote its account, seconds since the epoch."""
    tail: str = ""
    """The last lines that the rank wrote to its own streams, for a rank without an account."""

    @property
    def is_echo(self) -> bool:
        """Whether this looks like the consequence of another rank's failure."""
        return self.kind in _ECHOES or any(text in self.text for text in _ECHO_TEXTS)

    @property
    def was_ended(self) -> bool:
        """Whether the agent ended this rank because of another one."""
        return not self.text and self.kind != QUITTER and self.exitcode == -signal.SIGTERM


def write_error_file(error: BaseException, *, kind: str | None = None, text: str | None = None) -> bool:
    """Leave an account of an error for whoever started this rank.

    Args:
        error: The error.
        kind: What to call it; ``None`` is the name of its class.
        text: What to show of it; ``None`` is its traceback, or its message where that is enough.

    Returns:
        Whether there was somebody to leave it to. The first account stays: later errors of one rank are consequences.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return bool(path)
    moment = time.time()
    data = {
        "message": {
            "message": f"{type(error).__name__}: {message_of(error)}",
            "extraInfo": {
                "py_callstack": format_error(error) if text is None else text,
                "timestamp": str(int(moment)),
                "moment": moment,
                "kind": kind or type(error).__name__,
                "host": socket.gethostname(),
            },
        }
    }
    Path(path).write_text(json.dumps(data))
    return True


def message_of(error: BaseException) -> str:
    """What an error says of itself; its class may be the user's, and fail at that."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - it is the user's method
        return f"(its __str__ raises {type(broken).__name__})"


def format_error(error: BaseException) -> str:
    """A traceback that starts with the user's task; our own refusals need none. ``HYDRA_FULL_ERROR=1`` brings everything."""
    if os.environ.get("HYDRA_FULL_ERROR"):
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, ParallelismError):
        return str(error)
    report = traceback.TracebackException.from_exception(error)
    frames = list(report.stack)
    ours = [i for i, frame in enumerate(frames) if frame.name in ("run_job", "_run_job")]
    report.stack = traceback.StackSummary.from_list(frames[ours[-1] + 1 :] if ours else frames)
    return "".join(report.format()).rstrip()


def read_failures(failures: Mapping[int, Any], attempt: Path, exitcodes: Mapping[int, int]) -> list[Failure]:
    """How the ranks of a failed start ended.

    Torch's agent reports the failures that it has seen at one moment, which need not hold the cause, so what every rank left
    is read.

    Args:
        failures: Torch elastic's ``ProcessFailure`` objects by rank.
        attempt: The agent's folder of this start of the ranks, with ``<rank>/error.json``.
        exitcodes: Exit codes by rank, as far as known from elsewhere.
    """
    found = {rank: failure.exitcode for rank, failure in failures.items()} | {r: c for r, c in exitcodes.items() if c}
    files = {int(path.parent.name): path for path in attempt.glob("*/error.json")}
    return [_read_failure(rank, found.get(rank, 1), files.get(rank)) for rank in sorted({*found, *files})]


def _read_failure(rank: int, exitcode: int, file: Path | None) -> Failure:
    try:
        message = json.loads(file.read_text())["message"] if file is not None else None
    except (OSError, ValueError, KeyError):  # cut off while it was written
        message = None
    if not isinstance(message, dict):
        return Failure(rank, exitcode)
    extra = message.get("extraInfo", {})
    moment = float(extra.get("moment", extra.get("timestamp", "inf")))
    return Failure(rank, exitcode, extra.get("py_callstack", ""), extra.get("kind", ""), moment)


def find_cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow from.

    First the earliest account that is no echo, then a rank that ended without one (killed, or ``os._exit``), then the earliest
    echo.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.kind == FOLLOWER:
            return 3, failure.moment
        if failure.text and not failure.is_echo:
            return 0, failure.moment
        if not failure.text and not failure.was_ended:
            return 1, failure.moment
        return (2, failure.moment) if failure.text else (4, failure.moment)

    return min(failures, key=order)


def tell(cause: Failure, world_size: int, coordinate: Mapping[str, int], log: Path | None) -> str:
    """One screen about a failure: the account first, then who and where, last on the console."""
    place = " ".join(f"{axis}={index}" for axis, index in coordinate.items())
    who = f"rank {cause.rank} of {world_size} on {socket.gethostname()}{f' ({place})' if place else ''}"
    where = f"\n  its log: {log}" if log is not None and log.exists() else ""
    if cause.text:
        return f"{cause.text}\n{who} failed{where}"
    tail = cause.tail or (read_tail(log) if log is not None else "")
    tail = f"{tail}\n" if tail else ""
    how = _describe_exit(cause.exitcode)
    if cause.kind == QUITTER and cause.exitcode <= 1:  # ended by the agent, on its way out
        how = "left in the middle of its job"
    return f"{tail}{who} {how}, without an exception{where}"


def _describe_exit(exitcode: int) -> str:
    if exitcode >= 0:
        return f"left with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name}"


def read_tail(*paths: Path) -> str:
    """The last lines of a rank's own streams."""
    lines = [line for path in paths if path.exists() for line in path.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-_TAIL_LINES:])
