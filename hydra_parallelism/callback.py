"""The Hydra callback: a parallel context from job start to job end.

Hydra turns an ``Exception`` raised in a callback into a warning and runs the task all the same, with exit status 0. A start
that fails must not end like that, so the callback does one of two things:

* In a plain run the message is printed, once among all ranks, and every process leaves with status 1.
* In a sweep the call of the task function itself raises the error, so that Hydra reports it as that job's failure and goes on
  with the next one.
"""

import logging
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from . import resolvers
from .errors import ConfigurationError, ParallelismError

__all__ = ["ParallelismCallback"]

_log = logging.getLogger(__name__)

resolvers.register()


class ParallelismCallback(Callback):
    """Builds the meshes when a job starts and takes them down when it ends. Presets of the group ``parallelism`` attach it.

    Args:
        node: Dotted path of the parallelism node in the app's config.
    """

    def __init__(self, node: str = "parallelism") -> None:
        self.node = node

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the context. Collective. On failure the task does not run and the exit status is not 0."""
        try:
            self._start(config)
        except Exception as error:  # noqa: BLE001 - Hydra would swallow it and run the task
            self._refuse(error, config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Take the context down, also after a failure."""
        from . import runtime

        runtime.shutdown()

    def _start(self, config: DictConfig) -> None:
        from . import record, runtime

        node = OmegaConf.select(config, self.node)
        if node is None:
            raise ConfigurationError(
                f"the config has no node {self.node!r}\n"
                "  try: hydra.callbacks.parallelism.node=path.to.node, or choose a preset (parallelism=default)"
            )
        context = runtime.init(node, key=self.node, announce=_announce)
        if config.hydra.output_subdir is not None:
            record.write(context, Path(config.hydra.runtime.output_dir) / config.hydra.output_subdir)

    def _refuse(self, error: Exception, config: DictConfig) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            caller = _caller_of_on_job_start()
            if caller is not None:
                _raise_from_next_call(caller, error)
                return
        if not getattr(error, "announced", False):
            _announce(str(error) if isinstance(error, ParallelismError) else f"{type(error).__name__}: {error}")
        if os.environ.get("HYDRA_FULL_ERROR"):
            traceback.print_exception(error)
        raise SystemExit(1)


def _announce(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _caller_of_on_job_start() -> FrameType | None:
    """The frame of Hydra's ``run_job``, which calls the task function next."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "hydra._internal.callbacks" and frame.f_code.co_name == "on_job_start":
            return frame.f_back
        frame = frame.f_back
    return None


def _raise_from_next_call(caller: FrameType, error: Exception) -> None:
    """Make the next Python function that ``caller`` calls raise ``error`` before its first line.

    A profile function may raise, and Python then propagates that from the call. It is the one way to fail a task whose
    function Hydra holds in a local variable; it works for every callable and for every launcher.
    """

    def guard(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_back is caller:
            sys.setprofile(None)
            raise error

    sys.setprofile(guard)
