"""Starting and watching the processes of one job on this node, with torch's elastic agent.

``run_script`` starts this very command again, once for each rank: that is how a plain ``python train.py parallelism=hsdp``
becomes several processes. ``run_function`` starts a function in fresh processes forked from a server that has imported torch
once: that is how the jobs of a sweep start. Both return when all ranks have ended and raise :class:`WorkersFailed` when one
failed.
"""

import contextlib
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .census import Census
from .errors import ConfigurationError, LaunchError
from .failures import Failure, find_cause, read_failures, read_tail
from .launcher_config import TorchrunConfig
from .worker import PARENT

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = [
    "Interrupted",
    "WorkersFailed",
    "check",
    "describe_command",
    "end_children",
    "hidden_script",
    "run_function",
    "run_script",
    "start_server",
    "supervising",
    "terminable",
]


class WorkersFailed(LaunchError):
    """At least one rank failed.

    Attributes:
        cause: The failure that the others follow from.
    """

    def __init__(self, message: str, cause: Failure) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.cause)


class Interrupted(BaseException):
    """A signal ended the processes and must end this one too. Not an ``Exception``: Hydra would swallow it.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def check(options: TorchrunConfig, processes: int) -> None:
    """Refuse options that cannot work, all at once.

    Raises:
        ConfigurationError: Names every offending key.
    """
    key, problems = "hydra.launcher", []
    given = options.nproc_per_node
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        problems.append(f"{key}.nproc_per_node={given}: must be auto or a whole number of at least 1")
    least = {"nnodes": 1, "max_parallel_jobs": 1, "max_restarts": 0, "node_rank": 0, "shutdown_timeout": 0}
    below = {name: bound for name, bound in least.items() if getattr(options, name) < bound}
    problems += [f"{key}.{name}={getattr(options, name)}: must be at least {bound}" for name, bound in below.items()]
    if options.monitor_interval <= 0:
        problems.append(f"{key}.monitor_interval={options.monitor_interval}: must be more than 0")
    if options.nnodes > 1 and not options.rdzv_endpoint:
        problems.append(f"{key}.nnodes={options.nnodes} needs {key}.rdzv_endpoint=HOST:PORT, where the nodes meet")
    if options.nnodes > 1 and not options.rdzv_id:
        problems.append(f"{key}.nnodes={options.nnodes} needs {key}.rdzv_id=NAME, equal on all nodes")
    if options.nnodes >= 1 and processes % options.nnodes:
        problems.append(f"{processes} processes do not divide over {key}.nnodes={options.nnodes}")
    if problems:
        raise ConfigurationError("\n  ".join(["the launcher's options are not valid:", *problems]))


def describe_command(options: TorchrunConfig, processes: int, command: Sequence[str]) -> str:
    """The torchrun command that does the same as ``run_script``, to paste into a job script."""
    front = ["torchrun", "--nproc-per-node", str(processes // options.nnodes)]
    if options.nnodes == 1:
        front.insert(1, "--standalone")
    else:
        front += ["--nnodes", str(options.nnodes), "--rdzv-backend", options.rdzv_backend]
        front += ["--rdzv-endpoint", options.rdzv_endpoint, "--rdzv-id", str(options.rdzv_id)]
    if options.max_restarts:
        front += ["--max-restarts", str(options.max_restarts)]
    rest = list(command[1:])
    if rest and rest[0].startswith("-") and rest[0] != "-m":
        return shlex.join([*front, "--no-python", *command])  # interpreter flags
    return shlex.join([*front, *rest])


def run_script(options: TorchrunConfig, processes: int, command: Sequence[str], console: set[int]) -> None:
    """Run a command once for each rank on this node and wait.

    Args:
        options: The launcher's config.
        processes: Ranks on all nodes together.
        command: Interpreter and arguments, as in ``sys.orig_argv``.
        console: Local ranks whose streams go to the console; those of the others go to files.

    Raises:
        WorkersFailed: A rank failed; the message is for the console.
        Interrupted: A signal came and has been passed on.
    """
    with supervising(options), _log_folder(options) as folder:
        config = _launch_config(options, processes, folder, console, "spawn")
        _watch(config, folder, command[0], list(command[1:]))


def run_function(
    options: TorchrunConfig, processes: int, console: set[int], function: Callable[..., Any], *arguments: Any
) -> dict[int, Any]:
    """Call an importable function once for each rank, in fresh forks of the warm server; results by rank.

    Call it inside :func:`supervising` and :func:`hidden_script`, after :func:`start_server`. Several threads may.

    Raises:
        WorkersFailed: A rank failed.
        Interrupted: A signal came and has been passed on.
    """
    with _log_folder(options) as folder:
        config = _launch_config(options, processes, folder, console, "forkserver")
        return _watch(config, folder, function, list(arguments))


def end_children() -> None:
    """End the processes of all calls of ``run_function`` that are under way; their agents then see them fail."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()


def _watch(config: "LaunchConfig", folder: Path, entrypoint: Callable[..., Any] | str, arguments: list[Any]) -> dict[int, Any]:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    census = Census(folder, config.shutdown_timeout or 0)
    failures = None
    try:
        with census:
            return cast("dict[int, Any]", elastic_launch(config, entrypoint)(*arguments))
    except ChildFailedError as error:
        failures = error.failures
    except SignalException as error:
        number = int(error.sigval)
    except KeyboardInterrupt:
        number = int(signal.SIGINT)
    # Raised here, where the agent's error and with it the agent and its open files are gone.
    if failures is None:
        raise Interrupted(number)
    attempts = census.attempts()
    newest = attempts[-1] if attempts else folder
    cause = _add_tail(find_cause(read_failures(failures, newest, census.exitcodes())), newest)
    raise WorkersFailed(f"rank {cause.rank} failed", cause)


def _launch_config(
    options: TorchrunConfig, processes: int, folder: Path, console: set[int], start_method: str
) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    from . import local_rendezvous

    local_rendezvous.register()
    per_node = processes // options.nnodes
    alone = options.nnodes == 1
    quiet = {rank: Std.NONE if rank in console else Std.ALL for rank in range(per_node)}
    logs = DefaultLogsSpecs(
        log_dir=str(folder),
        redirects=quiet if options.redirects is None else Std.from_str(options.redirects),
        tee=Std.NONE if options.tee is None else Std.from_str(options.tee),
    )
    conf = dict(options.rdzv_conf)
    if options.rdzv_backend == "static":
        conf.setdefault("rank", options.node_rank)
    return LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=per_node,
        run_id=options.rdzv_id or uuid.uuid4().hex,
        rdzv_backend=local_rendezvous.BACKEND if alone else options.rdzv_backend,
        rdzv_endpoint="" if alone else options.rdzv_endpoint,
        rdzv_configs=conf,
        local_addr=options.local_addr or ("127.0.0.1" if alone else None),
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        start_method=start_method,
        logs_specs=logs,
        shutdown_timeout=options.shutdown_timeout,
        role="default",
    )


@contextlib.contextmanager
def _log_folder(options: TorchrunConfig) -> Iterator[Path]:
    """The agent's own folder for redirected streams and error files."""
    if options.log_dir is not None:
        yield Path(options.log_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="hydra_parallelism_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def supervising(options: TorchrunConfig) -> Iterator[None]:
    """What holds while processes are watched: what they inherit, and a quiet agent. Signal handlers are restored after."""
    with _environment(options), _quiet_agent(), _restored_signals():
        yield


def start_server(options: TorchrunConfig) -> None:
    """Start the server from which ``run_function`` forks, early: it imports torch while this process does something else."""
    from multiprocessing import forkserver, set_forkserver_preload

    set_forkserver_preload(["hydra_parallelism._preload"])
    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if alone else None  # the terminal's Ctrl-C is for this process
    try:
        with _environment(options):
            forkserver.ensure_running()
    except OSError as error:
        if "path too long" not in str(error):
            raise
        raise LaunchError(
            f"TMPDIR={tempfile.gettempdir()} is too long a path for the socket that processes are asked for through\n"
            "  try: TMPDIR=/tmp python ..."
        ) from error
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def hidden_script() -> Iterator[None]:
    """Hide the user's script from multiprocessing, which would import it in every process.

    The worker runs the script itself, as ``__main__``.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = type(sys)("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent's log says in many lines what we say in one screen. Each of its modules has a logger with its own level."""
    with _interrupted_after():
        import torch.distributed.launcher.api  # noqa: F401 - makes the loggers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the agent leaves its log files to the garbage collector
        with _silenced():
            yield


@contextlib.contextmanager
def _interrupted_after() -> Iterator[None]:
    """Hold a SIGINT back until the block is over: in the middle of importing torch it tears the interpreter apart.

    Raises:
        Interrupted: One came.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise Interrupted(came[0])


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Torch's loggers of the agent, while it runs."""
    prefixes = ("torch.distributed.elastic", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _environment(options: TorchrunConfig) -> Iterator[None]:
    """What all processes inherit, for the time of their start."""
    threads = options.omp_num_threads
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    wanted = {PARENT: str(os.getpid())} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    before = {name: os.environ.get(name) for name in (*wanted, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into :class:`Interrupted` while agents run in other threads, which see no signals.

    Raises:
        Interrupted: One came.
    """

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    with _restored_signals():
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, interrupt)
        yield


@contextlib.contextmanager
def _restored_signals() -> Iterator[None]:
    """The agent sets handlers and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_tail(cause: Failure, attempt: Path) -> Failure:
    if cause.text:
        return cause
    return replace(cause, tail=read_tail(*(attempt / str(cause.rank) / name for name in ("stdout.log", "stderr.log"))))
