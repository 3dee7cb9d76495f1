"""What a user may write: the structured configs of the ``parallelism`` node.

Plain data with defaults. Nothing here is computed and nothing is checked beyond the types that OmegaConf enforces: OmegaConf
runs no ``__post_init__`` for overrides, so :func:`hydra_parallelism.topology.resolve` is where values are judged. A ``-1``
stays a ``-1`` in the saved config; what it came to is in ``.hydra/parallelism.yaml``.

The classes are not frozen (OmegaConf would make their nodes read-only) and this module does not use postponed annotations
(nested dataclasses would break). It imports neither torch nor Hydra.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, List, Optional

__all__ = [
    "ContextParallelConfig",
    "DeviceType",
    "FSDPConfig",
    "MixedPrecision",
    "ParallelismConfig",
    "PipelineConfig",
    "PipelineSchedule",
    "RuntimeConfig",
    "WithParallelism",
]


class DeviceType(Enum):
    """Where the ranks compute. The member names are what one types."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class MixedPrecision(Enum):
    """The dtype FSDP computes in; parameters and optimizer state stay in float32."""

    bf16 = "bf16"
    fp16 = "fp16"


# The functional form, because torch's own schedule names are what users know and "1F1B" is not an identifier.
PipelineSchedule = Enum(
    "PipelineSchedule",
    [
        ("GPipe", "GPipe"),
        ("1F1B", "1F1B"),
        ("Interleaved1F1B", "Interleaved1F1B"),
        ("LoopedBFS", "LoopedBFS"),
        ("InterleavedZeroBubble", "InterleavedZeroBubble"),
        ("ZBVZeroBubble", "ZBVZeroBubble"),
        ("DualPipeV", "DualPipeV"),
    ],
    module=__name__,
)


@dataclass
class ContextParallelConfig:
    """How sequences are shared. The degrees multiply: ``cp = ring_degree * ulysses_degree`` ranks share one sequence."""

    ring_degree: int = 1
    """Ranks that pass key/value blocks around a ring (outer context axis). ``-1`` takes what is left of the world."""
    ulysses_degree: int = 1
    """Ranks that trade heads for sequence by all-to-all (inner context axis, adjacent ranks). ``-1`` takes what is left."""
    load_balance: bool = True
    """Which part of a sequence a ring rank holds. ``true``: an early and a late chunk (zig-zag), so that causal attention is
    equal work for all. ``false``: one stretch, in order; then later ring ranks compute more of a causal mask."""


@dataclass
class FSDPConfig:
    """How parameters are sharded over the ``fsdp`` axis. Applied by ``hydra_parallelism.parallelize``."""

    cpu_offload: bool = False
    """Keep the shards in host memory and copy them to the device for each use."""
    mixed_precision: Optional[MixedPrecision] = None
    """Compute and all-gather in ``bf16`` or ``fp16``; gradients are reduced in float32. ``null`` computes in float32."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after forward (less memory, one more all-gather in backward)."""
    wrap: Any = "auto"
    """What becomes one FSDP unit: ``auto`` (the members of the model's repeated block list), or a list of module class
    names and module name patterns, e.g. ``[Block]`` or ``[layers.*]``."""


@dataclass
class PipelineConfig:
    """How a model is cut into ``pp_size`` stages and how micro-batches move through them."""

    schedule: PipelineSchedule = PipelineSchedule["1F1B"]
    """Name of the schedule, as in ``torch.distributed.pipelining``."""
    microbatches: Optional[int] = None
    """Micro-batches per step; ``null`` is twice the number of stages. Must divide the batch of one data-parallel rank."""
    split: Any = "auto"
    """``auto`` (balanced by parameter count) or a list with one list of module names per stage."""


@dataclass
class RuntimeConfig:
    """How the processes meet and where they compute."""

    device_type: DeviceType = DeviceType.auto
    """``auto`` takes CUDA when it is there and the CPU otherwise; ``cuda`` and ``cpu`` insist."""
    backend: Optional[str] = None
    """Backend of the process groups, as torch spells it; ``null`` is ``gloo`` on CPU, ``cpu:gloo,cuda:nccl`` on CUDA."""
    timeout_s: float = 600.0
    """Seconds until a collective gives up, for every process group and not only for the default one."""
    start_timeout_s: float = 300.0
    """Seconds to wait at job start until all ranks have arrived and agreed on the topology."""
    log_ranks: Any = 0
    """Ranks that write to the console: a rank, a list of ranks, or ``all``. Every rank has its own ``ranks/<rank>.log``."""


@dataclass
class ParallelismConfig:
    """A topology as the user declares it.

    The degrees, outermost mesh axis first, must satisfy
    ``pp_size * dp_replicate * dp_shard * cfg_parallel * ring_degree * ulysses_degree * tp_size == world size``. At most one of
    them may be ``-1`` and takes what is left. A config whose degrees are all untouched means DDP over all launched processes.
    """

    pp_size: int = 1
    """Pipeline stages (mesh axis ``pp``, outermost). ``-1`` takes what is left of the world."""
    dp_replicate: int = 1
    """Replicas: DDP, or the outer axis of HSDP (mesh axis ``dp_replicate``). ``-1`` takes what is left of the world."""
    dp_shard: int = 1
    """FSDP shards (mesh axis ``dp_shard``). ``-1`` takes what is left of the world."""
    cfg_parallel: int = 1
    """1, or 2: the conditional and the unconditional branch of classifier-free guidance on separate ranks (mesh axis
    ``cfg``). Inference only; never shards weights."""
    context_parallel: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    """Degrees along the sequence (mesh axes ``ring`` and ``ulysses``)."""
    tp_size: int = 1
    """Tensor parallelism (mesh axis ``tp``, innermost: neighbouring ranks). ``-1`` takes what is left of the world."""
    ep_size: int = 1
    """Expert parallelism (mesh axis ``ep`` of the sparse view). Not a factor of the world: it re-uses the ranks of
    ``fsdp * tp``, so it must divide that product and be a multiple of ``tp_size``. ``-1`` takes as many as fit."""
    world_size: Optional[int] = None
    """Number of processes this layout is meant for. ``null`` asks the launcher. A number is checked against the launcher,
    and without one it says for how many processes to plan, e.g. on a login node."""
    dry_run: bool = False
    """Report what the job would be, and end with status 0 in its place: ``parallelism.dry_run=true``."""
    inference: bool = False
    """True when nothing is trained; needed for ``cfg_parallel=2``."""
    tp_plan: Any = None
    """Which modules are split how over ``tp``: ``null``, ``auto`` (the model's own plan), or a mapping of module name
    patterns to styles, merged over the model's own plan."""
    ep_plan: Any = None
    """Which modules hold experts and how tokens get to them over ``ep``: ``null``, ``auto`` (the model's own plan), or a
    mapping of name patterns to styles, e.g. ``ep_plan={layers.*.moe.experts: ep_dispatch_experts}``, merged over its own."""
    enable_sequence_parallel: bool = False
    """Shard the sequence between the tensor-parallel regions, over ``tp``."""
    enable_expert_parallel: bool = False
    """Deprecated: means ``ep_size=tp_size`` when ``ep_size`` is left alone. Write ``ep_size``."""
    activation_checkpointing: Any = "none"
    """Whose activations are computed again in backward instead of kept: ``none``, ``full`` (every block), or a number n (every
    n-th block), e.g. ``activation_checkpointing=2``."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding policy."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline policy."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """Devices, backend and time limits."""


def _mixin_defaults() -> List[Any]:
    return ["_self_", {"parallelism": "default"}]


@dataclass
class WithParallelism:
    """Base for a structured primary config, so that ``parallelism=hsdp`` works there too.

    Example:
        >>> @dataclass
        ... class Config(WithParallelism):
        ...     lr: float = 1e-3

    A class that brings its own defaults list keeps ``{"parallelism": "default"}`` in it.
    """

    defaults: List[Any] = field(default_factory=_mixin_defaults)
    """Hydra's defaults list."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Filled by the config group ``parallelism``."""
