"""One output folder for all ranks of a plain run, agreed before Hydra makes it.

Each rank composes its own config, so ``${now:...}`` differs between ranks that start a second apart: several folders, and
several values wherever an app uses a cached resolver. Rank 0's folder and its cached resolver values count.
"""

import base64
import os
import pickle
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from .errors import LaunchError
from .interpolations import resolve_cached
from .worker import RUN_DIR
from .world import World

__all__ = ["agree", "stay"]


def agree(config: DictConfig, world: World, store: dist.Store, timeout: timedelta) -> None:
    """Make ``hydra.run.dir`` rank 0's, absolute, on every rank; ranks above 0 write no ``.hydra``. Collective.

    A job that torch's agent restarts keeps the folder of its first attempt.

    Raises:
        LaunchError: Rank 0 did not say its folder in time.
    """
    store.set_timeout(timeout)
    if world.rank == 0:
        folder, cache = _remember(_choose(config)), _sendable(resolve_cached(config))
        store.set("run folder", base64.b64encode(pickle.dumps((folder, cache))).decode())
    try:
        folder, cache = pickle.loads(base64.b64decode(store.get("run folder")))
    except dist.DistStoreError as error:
        raise LaunchError(
            f"rank {world.rank} waited {timeout.total_seconds():g} s for rank 0's output folder ({world.source()})\n"
            "  try: look into the log of rank 0, or parallelism.runtime.start_timeout_s=900"
        ) from error
    _adopt(config, cache)
    with read_write(config), open_dict(config):
        config.hydra.run.dir = folder
        if world.rank != 0:
            config.hydra.output_subdir = None


def stay(config: DictConfig) -> None:
    """Keep a rank that is alone, now or since a restart, in the folder of its job's first attempt."""
    if _note() is not None:
        with read_write(config), open_dict(config):
            config.hydra.run.dir = _remember(_choose(config))


def _choose(config: DictConfig) -> str:
    # Whoever started these processes has chosen already, and shows the user that folder.
    return os.environ.get(RUN_DIR) or os.path.abspath(str(config.hydra.run.dir))


def _remember(folder: str) -> str:
    """The folder of this job's first attempt: torch's agent keeps a folder of its own over restarts, on its node."""
    note = _note()
    if note is None:
        return folder
    if note.exists():
        return note.read_text()
    note.write_text(folder)
    return folder


def _note() -> Path | None:
    """``<agent's run folder>/attempt_<n>/<local rank>/error.json`` -> a file in the agent's run folder."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not Path(path).parent.parent.name.startswith("attempt_"):
        return None
    return Path(path).parent.parent.parent / "hydra_run_dir"


def _sendable(cache: dict[str, dict[object, object]]) -> dict[str, dict[object, object]]:
    return {name: _plain(values) for name, values in cache.items()}


def _plain(values: dict[object, object]) -> dict[object, object]:
    """What can be sent; an exotic cached object stays each rank's own."""
    kept: dict[object, object] = {}
    for key, value in values.items():
        try:
            pickle.dumps((key, value))
        except Exception:  # noqa: BLE001 - pickling runs arbitrary code
            continue
        kept[key] = value
    return kept


def _adopt(config: DictConfig, cache: dict[str, dict[object, object]]) -> None:
    mine = OmegaConf.get_cache(config)
    for name, values in cache.items():
        mine.setdefault(name, {}).update(values)
