"""The Hydra callback: a parallel context from job start to job end.

Hydra turns an ``Exception`` raised in a callback into a warning and runs the task all the same, with exit status 0. A start
that fails must not end like that, so the callback does one of two things:

* In a plain run the message is shown once among all ranks, and every process leaves with status 1.
* In a sweep the call of the task function itself raises the error, so that Hydra reports it as that job's failure and goes on
  with the next one.
"""

import atexit
import contextlib
import logging
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from . import interpolations, memory, resolvers, worker, world
from .errors import ConfigurationError, ParallelismError
from .failures import FOLLOWER, QUITTER, format_error, write_error_file
from .logs import RankLog, console_ranks
from .topology import resolve

__all__ = ["ParallelismCallback"]

_logger = logging.getLogger(__name__)

resolvers.register()


class ParallelismCallback(Callback):
    """Builds the meshes when a job starts and takes them down when it ends. Presets of the group ``parallelism`` attach it.

    Args:
        node: Dotted path of the parallelism node in the app's config.
    """

    def __init__(self, node: str = "parallelism") -> None:
        self.node = node
        self._log: RankLog | None = None
        self._profiler: Any = None
        self._device_type: str | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a plain run makes its folder: say what it would be, start its processes, or agree with them on the folder."""
        from . import run_mode

        try:
            node = self._select(config)
            if run_mode.is_dry(config):
                from . import dry_run

                dry_run.tell(config)
                raise SystemExit(0)
            run_mode.enter(config, node, self.node)
        except Exception as error:  # noqa: BLE001 - Hydra would swallow it and run the task
            self._leave(error)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse a sweep in each of several launched processes, and a dry run of jobs that somebody else starts."""
        from . import run_mode

        try:
            run_mode.refuse_sweep()
            if run_mode.is_dry(config):
                from . import dry_run

                dry_run.refuse_sweep(config)
        except Exception as error:  # noqa: BLE001
            self._leave(error)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the context. Collective. On failure the task does not run and the exit status is not 0."""
        try:
            self._start(config)
        except Exception as error:  # noqa: BLE001
            caller = _caller_of_on_job_start()
            if config.hydra.mode == RunMode.MULTIRUN and caller is not None:
                self._close_log()
                self._profiler = _raise_from_next_call(caller, error)
            else:
                self._leave(error)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Take the context down, also after a failure, and see to it that one failure is told once."""
        from . import runtime

        atexit.unregister(_leave_account_of_quitting)
        if job_return.status is JobStatus.FAILED:
            error = job_return._return_value
            if isinstance(error, Exception):
                self._report(error)
            else:
                _leave_account_of_leaving(error, config.hydra.mode)
        if self._device_type is not None:
            memory.attach(job_return, [memory.peak(self._device_type)])
        runtime.shutdown()
        _resume(self._profiler)
        self._profiler = None
        if config.hydra.mode == RunMode.MULTIRUN:
            self._close_log()

    def _select(self, config: DictConfig) -> Any:
        node = OmegaConf.select(config, self.node)
        if node is None:
            raise ConfigurationError(
                f"the config has no node {self.node!r}\n"
                "  try: hydra.callbacks.parallelism.node=path.to.node, or choose a preset (parallelism=default)"
            )
        return node

    def _start(self, config: DictConfig) -> None:
        from . import record, runtime

        node = self._select(config)
        self._open_log(config, node)
        interpolations.check(config)
        context = runtime.init(node, key=self.node, announce=self._announce)
        self._device_type = context.device.type
        memory.reset(self._device_type)
        if worker.started_here():
            atexit.register(_leave_account_of_quitting)
        if config.hydra.output_subdir is not None or context.rank != 0:
            record.write(context, Path(config.hydra.runtime.output_dir) / (config.hydra.output_subdir or ""))

    def _open_log(self, config: DictConfig, node: DictConfig) -> None:
        """Give each of several ranks a log of its own, before anything can go wrong."""
        found = world.read()
        if found is None or found.size == 1:
            return
        place: dict[str, int] = {}
        with contextlib.suppress(ParallelismError):  # told by all ranks together, a moment later
            topology = resolve(node, found.size, key=self.node)
            place = {axis: at for axis, at in topology.coordinate(found.rank).items() if topology.size(axis) > 1}
        console = console_ranks(node.runtime.log_ranks, found.size, self.node)
        folder = Path(config.hydra.runtime.output_dir)
        self._log = RankLog(folder, found.rank, found.size, place, console)
        self._log.open()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log.give_streams_back()
            self._log = None

    def _announce(self, text: str) -> None:
        """Tell a refusal, on the one rank that is asked to."""
        if worker.started_here() and write_error_file(ConfigurationError(text)):
            return  # whoever started us shows it
        if self._log is not None:
            self._log.write_to_console(text)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _leave(self, error: Exception) -> None:
        """Tell an error, unless another rank has, and leave with status 1."""
        try:
            if not getattr(error, "announced", False):
                self._tell(error)
            elif worker.started_here():
                write_error_file(error, kind=FOLLOWER)
        finally:
            raise SystemExit(1)  # whatever else goes wrong: Hydra would run the task

    def _tell(self, error: Exception) -> None:
        if worker.started_here():
            write_error_file(error)
        elif self._is_first("refusal"):
            self._announce(format_error(error))

    def _report(self, error: Exception) -> None:
        """Leave an account of a failed task where it is shown once; what Hydra prints next goes to the log."""
        if self._log is None:
            return
        first = self._is_first("failure")
        if worker.started_here() or first:
            write_error_file(error)
        if first and not worker.started_here() and "TORCHELASTIC_ERROR_FILE" not in os.environ:
            self._log.give_streams_back()
            self._log.write_to_console(f"rank {self._log.rank} failed ({self._log.who}), its log: {self._log.path}")
        else:
            self._log.take_streams()
        _logger.error("the task failed\n%s", format_error(error))

    def _is_first(self, event: str) -> bool:
        """Whether no other rank has come here before; alone, or without a store to ask, a rank is."""
        from . import runtime

        return runtime.is_first(event)


def _leave_account_of_quitting() -> None:
    write_error_file(SystemExit(), kind=QUITTER, text="")


def _leave_account_of_leaving(error: BaseException, mode: RunMode) -> None:
    """Hydra 1.4 brings ``sys.exit`` and its like here. Told before the context goes down: peers fail because of that."""
    if not worker.started_here() or isinstance(error, KeyboardInterrupt):  # the parent tells of an interruption
        return
    if not isinstance(error, SystemExit):
        write_error_file(error)
    elif mode == RunMode.RUN:
        _leave_account_of_quitting()
    elif error.code not in (None, 0):
        write_error_file(error)


def _caller_of_on_job_start() -> FrameType | None:
    """The frame of Hydra's ``run_job``, which calls the task function next."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "hydra._internal.callbacks" and frame.f_code.co_name == "on_job_start":
            return frame.f_back
        frame = frame.f_back
    return None


def _raise_from_next_call(caller: FrameType, error: Exception) -> Any:
    """Make the next Python function that ``caller`` calls raise ``error`` before its first line.

    A profile function may raise, and Python then propagates that from the call. It is the one way to fail a task whose
    function Hydra holds in a local variable; it works for every callable and for every launcher.

    Returns:
        The profiler that was active, which raising switches off.
    """
    before = sys.getprofile()

    def guard(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_back is caller:
            sys.setprofile(None)
            raise error

    sys.setprofile(guard)
    return before


def _resume(profiler: Any) -> None:
    if hasattr(profiler, "enable"):
        profiler.enable()
    elif profiler is not None:
        sys.setprofile(profiler)
