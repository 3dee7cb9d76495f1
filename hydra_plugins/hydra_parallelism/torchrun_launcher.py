"""``hydra/launcher=torchrun``: the class that Hydra discovers. What it does is in ``hydra_parallelism.multirun``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hydra_parallelism import multirun

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
        return self.launch_watched(job_overrides, range(initial_job_idx, initial_job_idx + len(job_overrides)), None)

    def launch_watched(
        self, job_overrides: Sequence[Sequence[str]], numbers: Sequence[int], watch: "multirun.Watch | None"
    ) -> Sequence[JobReturn]:
        """The same for a sweeper that gives the jobs their numbers and wants to hear of each as it starts and ends."""
        from hydra_parallelism import multirun

        return multirun.launch(self.hydra_context.config_loader, self.config, job_overrides, numbers, watch)
