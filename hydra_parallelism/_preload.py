"""Imported once by the server from which the processes of a sweep are forked. Nothing here may touch a device or fail."""

import contextlib
import gc
import multiprocessing
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed
import torch.distributed.elastic.multiprocessing.errors

import hydra_parallelism.callback
import hydra_parallelism.logs
import hydra_parallelism.record
import hydra_parallelism.runtime
import hydra_parallelism.store
import hydra_parallelism.worker  # noqa: F401

with contextlib.suppress(ImportError):  # what most jobs use next; 0.6 s and more each when imported anew
    import torch.distributed.fsdp
    import torch.distributed.tensor.debug
    import torch.distributed.tensor.parallel  # noqa: F401


def _leave_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A fork that is still starting when its sweep is interrupted finds what it was sent gone. The sweep tells of it."""
    last = traceback.extract_tb(trace)[-1:]
    if not (issubclass(kind, FileNotFoundError) and last and Path(last[0].filename).parent == _MULTIPROCESSING):
        sys.__excepthook__(kind, error, trace)


_MULTIPROCESSING = Path(multiprocessing.__file__).parent
sys.excepthook = _leave_quietly

# The forks' garbage collector need not look at all this again: it would cost each of them half a second at its end.
gc.collect()
gc.freeze()
