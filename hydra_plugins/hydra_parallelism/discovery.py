"""The doorbell: Hydra imports this module when it looks for plugins, and that is what fills the ConfigStore."""

import os

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hydra_parallelism import store

__all__ = ["HydraParallelism"]

store.register()

if "HYDRA_PARALLELISM_PARENT" in os.environ:  # this process was started by us: as early as can be, for it may outlive us
    from hydra_parallelism import worker

    worker.adopt()


class HydraParallelism(SearchPathPlugin):
    """Named by the entry point ``hydra.plugins``, which must point to a plugin class; adds nothing to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Leave the search path as it is: presets come from the ConfigStore."""
