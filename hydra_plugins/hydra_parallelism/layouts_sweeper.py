"""``hydra/sweeper=layouts``: the class that Hydra discovers. What it does is in ``hydra_parallelism.sweep``."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

__all__ = ["LayoutsSweeper"]


class LayoutsSweeper(BasicSweeper):
    """Hydra's basic sweeper, its grammar and its ``params``, for layouts: those that exist, once, ranked at the end."""

    def __init__(self, params: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__(max_batch_size=None, params=params)
        self.options = options

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep and return the jobs' results in one batch."""
        from hydra_parallelism import sweep

        assert self.hydra_context is not None
        assert self.config is not None
        assert self.launcher is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        [combinations] = self.split_arguments(overrides, None)
        return [sweep.run(loader, self.config, self.launcher, combinations, self.options)]
