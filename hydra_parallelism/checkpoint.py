"""Save a run under one layout, resume it under another.

``save`` and ``load`` go through ``torch.distributed.checkpoint``: each rank writes what it holds, by the names of the whole
model, and reads whichever pieces it needs. What may change between them, and what is said then:

=========================================  ==============================================================================
change                                     policy
=========================================  ==============================================================================
any degree, the number of processes        fine; one log line, which also tells when batches go to other ranks
versions of torch or of this library       fine; they are in the record, ``topology.yaml``
names of parameters, shapes, optimizer     refused with the names, on every rank, before anything is changed
a folder that is not whole                 refused: a save that was killed leaves no folder, a bad copy is noticed
=========================================  ==============================================================================

Not saved: states of random generators, which belong to ranks and not to the run. Draw from
:func:`~hydra_parallelism.seed_for` with the step in ``purpose``, and a resumed run draws what it would have drawn.

A checkpoint holds pickles, as those of ``torch.distributed.checkpoint`` do: load none that you do not trust.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as read_into
from torch.distributed.checkpoint import save as write_from
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from . import _checkpoint_files as files
from . import _checkpoint_state as states
from .errors import ConfigurationError, ParallelismError
from .runtime import ParallelContext, current

__all__ = ["export", "load", "save"]

_log = logging.getLogger(__name__)
_Path = str | os.PathLike[str]


def save(
    folder: _Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Any = None,
    overwrite: bool = False,
    context: ParallelContext | None = None,
) -> None:
    """Write a checkpoint that any layout can resume from. Collective: call on all ranks.

    The folder appears when the checkpoint is whole, and not before: a save that is killed leaves nothing but a hidden folder
    beside it, which the next save removes. Works in a process without a parallel context too.

    Args:
        folder: Where to, on a file system that all ranks share; its parents are made.
        model: What ``parallelize`` returned, or any module. Under pipeline parallelism this rank's stages, with the names that
            their parameters have in the whole model.
        optimizer: Of the model's parameters. One that has taken no step is saved as such.
        extra: What else a resume needs, e.g. ``{"step": step, "scheduler": scheduler.state_dict()}``: numbers, strings, tensors
            and containers of them. Rank 0's is kept.
        overwrite: Replace a checkpoint that is there. It stays until the new one is whole.
        context: The layout to record; ``None`` takes the running job's, if there is one.

    A simulated rank writes nothing and logs a warning: the parts of the other ranks exist nowhere.

    Raises:
        ConfigurationError: The folder exists, ``extra`` cannot be kept, or the ranks do not share the file system.
        OSError: Rank 0 cannot write; on every rank.
        torch.distributed.checkpoint.CheckpointException: Some rank cannot write; on every rank.

    Example:
        >>> hydra_parallelism.save(f"checkpoints/{step}", model, optimizer, extra={"step": step})
    """
    path, context = Path(folder).absolute(), context or _running()
    if _is_alone(context, f"no checkpoint {path}"):
        return
    files.on_first(lambda: files.prepare(path, extra, overwrite=overwrite))
    state = states.collect(model, optimizer)
    with _quiet():
        write_from(
            state,
            storage_writer=FileSystemWriter(files.partial(path)),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )
    files.on_first(lambda: files.finish(path, context))


def load(
    folder: _Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    context: ParallelContext | None = None,
) -> Any:
    """Read a checkpoint into a model and an optimizer of any layout, in place. Collective: call on all ranks.

    Args:
        folder: What ``save`` got.
        model: As for ``save``, already under its own layout.
        optimizer: As for ``save``; ``None`` reads the weights alone. State and settings (``lr`` and so on) are replaced.
        context: The layout at hand; ``None`` takes the running job's, if there is one.

    Returns:
        The ``extra`` that ``save`` got, tensors on the CPU.

    Raises:
        ConfigurationError: There is no whole checkpoint, it is one of another model or optimizer, or it was saved without an
            optimizer. The same on every rank, before anything is changed. Also, but only after the weights were read: the
            parameters of one param group were saved with different settings.
    """
    path, context = Path(folder).absolute(), context or _running()
    saved, metadata = files.agree(lambda: files.readable(path, files.open_))
    extra = files.agree(lambda: files.readable(path, files.read_extra))
    state = states.target(model, optimizer, metadata)
    states.check(state, metadata, with_optimizer=optimizer is not None)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _tell(path, saved, context)
    with _quiet():
        read_into(
            state,
            storage_reader=FileSystemReader(path),
            # Without the flattening of torch: it would put what it reads into a copy of the table.
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized() or _is_simulated(context),  # who is alone has nobody to plan with
        )
    files.agree(lambda: states.apply(model, optimizer, state))
    return extra


def export(file: _Path, model: nn.Module) -> None:
    """Write the whole state dict to one file, as one process without a layout has it. Collective: call on all ranks.

    Each rank but 0 that holds the only whole copy of a tensor (the stages of a pipeline) sends it there, so rank 0 needs memory
    for the whole model on the CPU. ``Model().load_state_dict(torch.load(file))`` reads it.
    A simulated rank writes nothing and logs a warning.

    Args:
        file: Where to; replaced if it is there. Rank 0 writes it with ``torch.save``.
        model: As for :func:`save`.

    Raises:
        ConfigurationError: The name is that of a folder, or ends in ``.safetensors``, another format.
        OSError: Rank 0 cannot write; on every rank.
    """
    path = Path(file).absolute()
    if _is_alone(_running(), f"no file {path}"):
        return
    files.on_first(lambda: _check_file(path))
    whole = _gather(model)
    files.on_first(lambda: _write(path, whole))


def _running() -> ParallelContext | None:
    try:
        return current()
    except ParallelismError:
        return None


def _is_simulated(context: ParallelContext | None) -> bool:
    return context is not None and context.world.simulated


def _is_alone(context: ParallelContext | None, what: str) -> bool:
    """Whether this is a simulated rank, which then says what it does not write."""
    if context is None or not context.world.simulated:
        return False
    _log.warning(
        "%s: rank %d is simulated (%s), and the other %d ranks have no parts to write",
        *(what, context.rank, context.world.source(), context.world_size - 1),
    )
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that there is no process group, which is on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _tell(path: Path, saved: dict[str, Any], context: ParallelContext | None) -> None:
    """Say that the layout has changed, and that batches go to other ranks now."""
    now = context.topology.degrees() if context else None
    then = saved.get("degrees")
    if now == then:
        return
    world = dist.get_world_size() if dist.is_initialized() else 1
    shares = context.dp_world_size if context else world
    before = saved.get("dp_world_size", saved["world_size"])
    moved = f"; dp_world_size was {before} and is {shares}: samples go to other ranks" if before != shares else ""
    names = _layout(then, saved["world_size"]), _layout(now, world)
    if names[0] != names[1]:
        _log.info("%s: saved under %s, loading under %s%s", path, *names, moved)


def _layout(degrees: dict[str, int] | None, world: int) -> str:
    set_ = " * ".join(f"{axis}={size}" for axis, size in (degrees or {}).items() if size > 1)
    return set_ or ("one process" if world == 1 else f"{world} processes without a layout")


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError(
            f"{path} is a folder, and export writes one file\n  try: export({str(path / 'model.pt')!r}, model)"
        )
    if path.suffix == ".safetensors":
        raise ConfigurationError(
            f"export writes torch's own format, and {path.name} is named like another\n  try: {path.with_suffix('.pt').name}"
        )


def _write(path: Path, whole: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    place = files.partial(path)
    torch.save(whole, place)
    place.replace(path)


def _gather(model: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0, on the CPU, and nothing elsewhere. Collective over the world."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states.settle(model)
    held = get_model_state_dict(model)
    owners: dict[str, int] = {}
    for owner, names in enumerate(files.unite(list(held))):
        owners |= {name: owner for name in names if name not in owners}
    mine: dict[str, Any] = {}
    for name, value in held.items():
        if isinstance(value, DTensor):
            on_wire: Any = value.to(_wire())  # weights that are offloaded to the CPU
            value = on_wire.full_tensor()  # all ranks of its mesh take part
        if owners[name] == rank:
            mine[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    # Shapes first, then tensor by tensor: the sums above are done, so nobody waits for a rank that waits here.
    sent = {name: _outline(value) for name, value in mine.items()} if rank else {}
    for owner, outlines in enumerate(files.unite(sent)):
        for name, outline in outlines.items():
            if rank == owner:
                _send(mine[name])
            elif rank == 0:
                mine[name] = _receive(outline, owner)
    return mine if rank == 0 else {}


def _outline(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _send(value: Any) -> None:
    if isinstance(value, Tensor):
        dist.send(value.contiguous().to(_wire()), dst=0)


def _receive(outline: Any, owner: int) -> Any:
    if not isinstance(outline, Tensor):
        return outline
    value = torch.empty(outline.shape, dtype=outline.dtype, device=_wire())
    dist.recv(value, src=owner)
    return value.cpu()


def _wire() -> torch.device:
    """Where tensors must be to be sent: NCCL takes none from the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
