"""``hydra/launcher=torchrun``: the class that Hydra discovers. What it does is in ``hydra_parallelism.multirun``."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

__all__ = ["TorchrunLauncher"]


class TorchrunLauncher(Launcher):
    """Starts each job of a sweep on as many fresh local processes as the job's own degrees ask for."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra hands over."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return one result each; a failed job is a failed result, the others run."""
        from hydra_parallelism import multirun

        return multirun.launch(self.hydra_context.config_loader, self.config, job_overrides, initial_job_idx)
