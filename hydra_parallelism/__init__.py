"""Declare a device topology in Hydra, get named device meshes when the job starts.

The names below load on first use (PEP 562): importing this package imports no torch.
"""

import sys as _sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import resolvers as _resolvers

if TYPE_CHECKING:
    from .checkpoint import export, load, save
    from .config import (
        ContextParallelConfig,
        FSDPConfig,
        ParallelismConfig,
        PipelineConfig,
        RuntimeConfig,
        SimulateConfig,
        WithParallelism,
    )
    from .context_parallel.attention import attention
    from .context_parallel.shards import shard_sequence, unshard_sequence
    from .data_loading import distributed_sampler, seed_for
    from .errors import ConfigurationError, LaunchError, ParallelismError
    from .gradients import average_loss, clip_grad_norm_
    from .guidance import guided
    from .moe import MoE
    from .parallelize import parallelize
    from .parallelize.steps import accumulate, forward_backward
    from .runtime import ParallelContext, current, init, parallel_context, shutdown
    from .topology import Topology, resolve

__all__ = [
    "ConfigurationError",
    "ContextParallelConfig",
    "FSDPConfig",
    "LaunchError",
    "MoE",
    "ParallelContext",
    "ParallelismConfig",
    "ParallelismError",
    "PipelineConfig",
    "RuntimeConfig",
    "SimulateConfig",
    "Topology",
    "WithParallelism",
    "accumulate",
    "attention",
    "average_loss",
    "clip_grad_norm_",
    "current",
    "distributed_sampler",
    "export",
    "forward_backward",
    "guided",
    "init",
    "load",
    "parallel_context",
    "parallelize",
    "resolve",
    "save",
    "seed_for",
    "shard_sequence",
    "shutdown",
    "unshard_sequence",
]

__version__ = "0.1.0"

_HOMES = {
    "checkpoint": ("export", "load", "save"),
    "config": (
        "ContextParallelConfig",
        "FSDPConfig",
        "ParallelismConfig",
        "PipelineConfig",
        "RuntimeConfig",
        "SimulateConfig",
        "WithParallelism",
    ),
    "context_parallel.attention": ("attention",),
    "context_parallel.shards": ("shard_sequence", "unshard_sequence"),
    "data_loading": ("distributed_sampler", "seed_for"),
    "errors": ("ConfigurationError", "LaunchError", "ParallelismError"),
    "gradients": ("average_loss", "clip_grad_norm_"),
    "guidance": ("guided",),
    "moe": ("MoE",),
    "parallelize": ("parallelize",),
    "parallelize.steps": ("accumulate", "forward_backward"),
    "runtime": ("ParallelContext", "current", "init", "parallel_context", "shutdown"),
    "topology": ("Topology", "resolve"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

# A config that names our classes or callback unpickles in a child process by importing this package, and then its
# interpolations must be answered there too.
_resolvers.register()

# torch.distributed.launch and old scripts append --local-rank=N, which Hydra's parser does not know.
if any(argument.startswith(("--local-rank", "--local_rank")) for argument in _sys.argv):
    from ._local_rank import strip as _strip

    _strip(_sys.argv)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
