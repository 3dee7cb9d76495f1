"""A process that this library started: tied to its parent, and, in a sweep, running one job of it."""

import ctypes
import logging
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import memory
from .errors import LaunchError
from .failures import write_error_file
from .logs import flush

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

__all__ = [
    "PARENT",
    "RUN_DIR",
    "Returned",
    "SentJob",
    "adopt",
    "read_pid",
    "run_sent_job",
    "start_time",
    "started_here",
    "tie_to_parent",
]

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_", "OMP_NUM_THREADS")


PARENT = "HYDRA_PARALLELISM_PARENT"
"""Set for processes that this library starts: the process that watches them."""
RUN_DIR = "HYDRA_PARALLELISM_RUN_DIR"
"""The output folder that the parent of a plain run has chosen for the processes it starts."""
_started_here = False


def started_here() -> bool:
    """Whether this library started this process, so that somebody shows what it leaves in its error file."""
    return _started_here


def adopt() -> None:
    """Take note of the parent, once, if it is the process that the variable names. Its own children must not see it."""
    global _started_here
    parent = os.environ.pop(PARENT, "")
    if parent == str(os.getppid()):
        _started_here = True
        tie_to_parent(os.getppid())
        _leave_pid()
        sys.excepthook = _say_no_more_than_the_parent
    elif parent.isdigit() and not Path(f"/proc/{parent}").exists() and Path("/proc/self").exists():
        os._exit(1)  # it was killed while this process was starting


def _say_no_more_than_the_parent(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    write_error_file(error)
    if not issubclass(kind, KeyboardInterrupt):  # the parent says once that it was interrupted
        sys.__excepthook__(kind, error, trace)


def _leave_pid() -> None:
    """Let whoever watches find this process, beside its error file."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    try:
        Path(error_file).with_name("pid").write_text(f"{os.getpid()} {start_time(os.getpid())}")
    except FileNotFoundError:  # the parent was interrupted while this process was starting, and has cleaned up
        os._exit(1)


def read_pid(path: Path) -> tuple[int, str]:
    """Process id and start time from what a process has left; ``(0, "")`` while it is being written."""
    try:
        pid, _, began = path.read_text().partition(" ")
        return int(pid), began
    except (OSError, ValueError):
        return 0, ""


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks: with its id it is unique. Empty when it is gone, or not on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, also by SIGKILL. Linux only; elsewhere the agent's signals do."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _die_with(parent: int) -> None:
    """End this process when a process that is not its parent ends: the server that forked it lives as long as its forks."""

    def watch() -> None:
        _wait_for_the_end_of(parent)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="hydra_parallelism parent watch").start()


def _wait_for_the_end_of(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel
        while True:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return
            time.sleep(1)
    select.select([handle], [], [])


@dataclass(frozen=True)
class SentJob:
    """One job of a sweep, on its way to its processes."""

    script: str
    """Path of the user's script, or the name of the module that ``python -m`` ran."""
    is_module: bool
    parent: int
    """The process that runs the sweep."""
    argv: tuple[str, ...]
    environ: dict[str, str]
    config: bytes
    """The composed config, pickled: it may name classes of the user's script, so it is read while that runs."""


@dataclass(frozen=True)
class Returned:
    """What one rank of a job sends back."""

    value: bytes | None = None
    """Rank 0's return value, pickled."""
    peak_memory: tuple[int, ...] = ()
    """Bytes, of this rank alone; nothing when no callback has measured."""


class _JobDone(SystemExit):
    """Unwinds the user's script once its job is over; ends a thread silently where the script calls main in one."""


@dataclass
class _Outcome:
    """What the job came to, seen from outside the user's script."""

    is_over: bool = False
    returned: Returned = Returned()
    error: BaseException | None = None


def run_sent_job(job: SentJob) -> Returned:
    """Run the user's script as ``__main__`` up to its ``@hydra.main``, which runs the job that was sent. On every rank.

    Nothing of the task is pickled: the script is executed again, as torchrun would, so ``python train.py``, ``python -m``,
    console scripts and tasks defined in ``__main__`` all work.

    Returns:
        Rank 0's return value, and the memory that this rank took.
    """
    global _started_here
    _started_here = True
    os.environ.pop(PARENT, None)
    os.setsid()  # the terminal's Ctrl-C goes to the parent alone, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    _die_with(job.parent)
    _leave_pid()
    os.environ.update({name: value for name, value in job.environ.items() if not name.startswith((*_OF_RANK, PARENT))})
    sys.argv = list(job.argv)
    outcome = _Outcome()
    restore = _intercept_hydra(job, outcome)
    try:
        _run_script(job)
        if not outcome.is_over:
            raise LaunchError(f"{job.script} ended without calling its @hydra.main function")
    except _JobDone:
        pass
    except BaseException as error:  # noqa: BLE001 - told below, and to the parent
        outcome.error = outcome.error or error
    finally:
        restore()
        flush()
    if outcome.error is not None and not _is_success(outcome.error):
        write_error_file(outcome.error)
        raise SystemExit(1) from outcome.error
    return outcome.returned


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _run_script(job: SentJob) -> None:
    if job.is_module:
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(job.script, run_name="__main__")


def _intercept_hydra(job: SentJob, outcome: _Outcome) -> Callable[[], None]:
    """Let ``@hydra.main`` run the job that was sent instead of composing one from ``sys.argv``."""
    main = sys.modules["hydra.main"]
    original = main._run_hydra

    def run(*args: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        try:
            result = _run_job(job, task_function)
            # Here, where ``__main__`` is the script: the value may be of a class of its own.
            value = _pack(result.return_value) if os.environ["RANK"] == "0" else None
            outcome.returned = Returned(value, tuple(memory.read(result)))
        except BaseException as error:
            outcome.error = error
            raise
        finally:
            outcome.is_over = True
        raise _JobDone

    main._run_hydra = run  # type: ignore[attr-defined]

    def restore() -> None:
        main._run_hydra = original  # type: ignore[attr-defined]

    return restore


def _pack(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - pickling runs arbitrary code
        _log.warning("the job returns None to the sweep: its %s cannot be sent: %s", type(value).__name__, error)
        return None


def _run_job(job: SentJob, task_function: Callable[..., Any]) -> "JobReturn":
    from hydra._internal.callbacks import Callbacks
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobRuntime, JobStatus, run_job, setup_globals
    from hydra.types import HydraContext
    from omegaconf import open_dict, read_write

    Singleton._instances.pop(JobRuntime, None)
    setup_globals()
    config = pickle.loads(job.config)
    JobRuntime.instance().set("name", config.hydra.job.name)
    if os.environ["RANK"] != "0":
        with read_write(config), open_dict(config):
            config.hydra.output_subdir = None
    context = HydraContext(config_loader=None, callbacks=Callbacks(config))  # type: ignore[arg-type]
    result = run_job(
        hydra_context=context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    if result.status is not JobStatus.COMPLETED:
        raise result._return_value
    return result
