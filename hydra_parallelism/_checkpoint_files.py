"""The folder of a checkpoint: how it comes to be whole or not at all, and how one tells.

===================  ===============================================================================================
file                 what it holds
===================  ===============================================================================================
``__R_0.distcp``     what rank R wrote of the weights and the optimizer (torch.distributed.checkpoint)
``.metadata``        which part of which tensor is in which file, and where (torch.distributed.checkpoint)
``topology.yaml``    the layout that saved it, and versions
``extra.pt``         whatever else the caller gave, from rank 0
===================  ===============================================================================================

A save writes to ``.NAME.partial`` beside the folder; rank 0 renames it when every file is there, so a folder that has its name
is whole. When it replaces another, that one is ``.NAME.replaced`` for the moment between two renames.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import yaml
from torch.distributed.checkpoint import FileSystemReader, Metadata

from . import fake_groups, record
from .errors import ConfigurationError, ParallelismError
from .runtime import ParallelContext

__all__ = ["agree", "finish", "on_first", "open_", "partial", "prepare", "read_extra", "readable", "unite"]

_FORMAT = 1
_RECORD, _EXTRA = "topology.yaml", "extra.pt"
_T = TypeVar("_T")


def partial(folder: Path) -> Path:
    """Where a checkpoint is before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def prepare(folder: Path, extra: Any, *, overwrite: bool) -> None:
    """Make an empty place to write to. For rank 0.

    Raises:
        ConfigurationError: The folder exists and is not to be overwritten, or ``extra`` could not be read back.
    """
    if folder.exists() and not overwrite:
        raise ConfigurationError(
            f"{folder} exists already\n  try: a folder with the number of the step, or save(..., overwrite=True)"
        )
    if folder.exists() and not (folder / _RECORD).is_file():
        raise ConfigurationError(f"{folder} exists and is not a checkpoint, so it is not replaced\n  try: another folder")
    content = _pack(extra)
    shutil.rmtree(partial(folder), ignore_errors=True)  # of a save that was killed
    partial(folder).mkdir(parents=True)
    (partial(folder) / _EXTRA).write_bytes(content)


def finish(folder: Path, context: ParallelContext | None) -> None:
    """Check that every rank's file has come, and give the folder its name. For rank 0, after all have written.

    Raises:
        ConfigurationError: Files are missing: the ranks do not share a file system.
    """
    place = partial(folder)
    lacking = _lacking(place, FileSystemReader(place).read_metadata())
    if lacking:
        raise ConfigurationError(
            f"{place} lacks {len(lacking)} file(s) that other ranks have written: {_some(lacking)}\n"
            "  a checkpoint is one folder that all ranks see\n"
            "  try: a folder on a file system that the nodes share"
        )
    (place / _RECORD).write_text(yaml.safe_dump(_describe(context), sort_keys=False))
    if folder.exists():
        shutil.rmtree(_replaced(folder), ignore_errors=True)
        folder.rename(_replaced(folder))
    place.rename(folder)
    shutil.rmtree(_replaced(folder), ignore_errors=True)


def open_(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """The record and the table of contents of a checkpoint, which is whole.

    Raises:
        ConfigurationError: There is none here, it lacks files, or another program or a newer release wrote it.
    """
    if not folder.is_dir():
        left = [str(path) for path in (partial(folder), _replaced(folder)) if path.exists()]
        killed = f"\n  a save into it was killed and left {' and '.join(left)}: the first is not whole, a '.replaced' is"
        raise ConfigurationError(
            f"there is no checkpoint at {folder}{killed if left else ''}\n  try: the folder that save() got"
        )
    present = [name for name in (_RECORD, ".metadata") if (folder / name).is_file()]
    if len(present) < 2:
        missing = " and ".join(name for name in (_RECORD, ".metadata") if name not in present)
        raise ConfigurationError(
            f"{folder} lacks {missing}, so it is not a whole checkpoint of hydra_parallelism.save()\n"
            "  try: the folder that save() got, copied with its hidden files"
        )
    saved = yaml.safe_load((folder / _RECORD).read_text())
    if saved.get("format") != _FORMAT:
        raise ConfigurationError(
            f"{folder}/{_RECORD} has format {saved.get('format')!r}, and this release reads {_FORMAT}\n"
            f"  try: hydra-parallelism {saved.get('versions', {}).get('hydra-parallelism')}, which wrote it"
        )
    metadata = FileSystemReader(folder).read_metadata()
    lacking = _lacking(folder, metadata)
    if lacking:
        raise ConfigurationError(
            f"the checkpoint {folder} is incomplete: {len(lacking)} file(s) are missing or too short: {_some(lacking)}\n"
            "  each rank wrote one, and all are needed whatever the layout\n"
            "  try: copy the folder again, or an earlier checkpoint"
        )
    return saved, metadata


def read_extra(folder: Path) -> Any:
    """What the caller of ``save`` gave along."""
    return torch.load(folder / _EXTRA, map_location="cpu", weights_only=True)


def readable(folder: Path, read: Callable[[Path], _T]) -> _T:
    """Read something of a checkpoint.

    Raises:
        ConfigurationError: What is there is damaged.
    """
    try:
        return read(folder)
    except (ParallelismError, OSError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the checkpoint {folder} is damaged: {type(error).__name__}: {error}\n"
            "  try: copy the folder again, or an earlier checkpoint"
        ) from error


def on_first(act: Callable[[], _T]) -> _T:
    """Do something on rank 0 alone; its result, or its error, is every rank's. Collective over the world."""
    result: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result[0] = act()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for it
            result[1] = _portable(error)
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise result[1]
    value: _T = result[0]
    return value


def agree(act: Callable[[], _T]) -> _T:
    """Do something on every rank; the first error is every rank's. Collective over the world."""
    value, error = None, None
    try:
        value = act()
    except Exception as caught:  # noqa: BLE001 - the other ranks wait for it
        error = _portable(caught)
    first = next((one for one in unite(error) if one is not None), None)
    if first is not None:
        raise first
    return value  # type: ignore[return-value]


def unite(mine: _T) -> list[_T]:
    """Every rank's value, by rank. Collective over the world."""
    if not dist.is_initialized() or fake_groups.is_fake():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _portable(error: Exception) -> Exception:
    """An error that survives the way to another rank."""
    if isinstance(error, ParallelismError | OSError):
        return error
    return ParallelismError(f"{type(error).__name__}: {error}")


def _pack(extra: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"extra could not be read back from the checkpoint: {str(error).splitlines()[0]}\n"
            "  it may hold numbers, strings, tensors, lists, tuples and dicts\n"
            "  try: extra={'step': step, 'scheduler': scheduler.state_dict()}"
        ) from None
    return buffer.getvalue()


def _lacking(folder: Path, metadata: Metadata) -> list[str]:
    """Files of a checkpoint that are missing, or shorter than what was written to them."""
    needed: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    return sorted(name for name, size in needed.items() if sizes.get(name, -1) < size)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _describe(context: ParallelContext | None) -> dict[str, Any]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    degrees = {"degrees": context.topology.degrees(), "dp_world_size": context.dp_world_size} if context else {}
    return {"format": _FORMAT, "world_size": world, **degrees, "versions": record.versions()}
