"""What one rank works with: its part of the parameters, and how often it computes in a step. Pure."""

from dataclasses import dataclass

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..topology import Topology
from .model import Model
from .schedules import divide, microbatches_of, stages_of, stages_per_rank

__all__ = ["Share", "calls_of", "compute_bytes", "fullest", "refuse", "share_of"]


@dataclass(frozen=True)
class Share:
    """Parameters that a rank works with when they are gathered."""

    stages: int
    """Of the pipeline, that it has; 1 without one."""
    blocks: int
    """How many blocks these have."""
    block: float
    """Of one block, without its experts."""
    experts: float
    """Of one block's experts."""
    first: float
    """Of embedding and table of positions; 0 where another rank has them."""
    last: float
    """Of last norm and head, likewise."""

    @property
    def ends(self) -> float:
        """first + last."""
        return self.first + self.last

    @property
    def params(self) -> float:
        """blocks * (block + experts) + ends."""
        return self.blocks * (self.block + self.experts) + self.ends


def compute_bytes(config: ParallelismConfig) -> int:
    """Of a number that is computed with: 2 under mixed precision, else 4."""
    return 4 if config.fsdp.mixed_precision is None else 2


def share_of(model: Model, at: Topology, config: ParallelismConfig, index: int) -> Share:
    """The share of the ranks at an index along ``pp``. Blocks go to stages as ``pipeline.split=auto`` has it.

    Over ``tp`` matrices are split; norms, routers and positions are not, nor are experts, of which a rank has ``experts / ep``
    whole ones.
    """
    schedule = config.pipeline.schedule.name
    stages = at.pp * stages_per_rank(schedule) if at.pp > 1 else 1
    mine = stages_of(schedule, at.pp, index) if at.pp > 1 else (0,)
    first = model.embedding + model.table
    blocks = divide(model.layers, stages, model.block, first, model.head)
    feed_forward = 0 if model.experts > 1 else model.feed_forward / at.tp
    norm = model.hidden
    return Share(
        stages=len(mine),
        blocks=sum(blocks[stage] for stage in mine),
        block=model.attention / at.tp + feed_forward + model.whole,
        experts=model.experts * model.feed_forward / at.ep if model.experts > 1 else 0.0,
        first=model.embedding / at.tp + model.table if 0 in mine else 0.0,
        # A head that is the embedding is counted there.
        last=(model.head - norm) / at.tp + norm if stages - 1 in mine else 0.0,
    )


def fullest(model: Model, at: Topology, config: ParallelismConfig) -> Share:
    """The share with most parameters."""
    return max((share_of(model, at, config, index) for index in range(at.pp)), key=lambda share: share.params)


def calls_of(model: Model, at: Topology, config: ParallelismConfig) -> int:
    """Calls of ``forward_backward`` whose gradients make one step, as ``accumulate`` counts them.

    Raises:
        ConfigurationError: ``model.batch`` is no multiple of what all data-parallel ranks take in a call.
    """
    count = microbatches_of(config.pipeline, at.pp)
    taken = at.dp * model.micro_batch * count
    if model.batch is None:
        return 1
    calls, rest = divmod(model.batch, taken)
    if rest or not calls:
        parts = f" * {count} micro-batches" if at.pp > 1 else ""
        raise ConfigurationError(
            f"model.batch={model.batch} is not a multiple of dp={at.dp} * model.micro_batch={model.micro_batch}{parts} = {taken}, "
            f"which one call takes\n  try: model.batch={max(calls, 1) * taken}"
        )
    return calls


def refuse(model: Model, at: Topology, config: ParallelismConfig) -> None:
    """Refuse to price what would not run, or is not known here.

    Raises:
        ConfigurationError: Too few blocks for the stages, an explicit split, tied weights in a pipeline, or a batch that does
            not divide.
    """
    if at.pp > 1:
        schedule = config.pipeline.schedule.name
        stages = at.pp * stages_per_rank(schedule)
        if model.layers < stages:
            raise ConfigurationError(
                f"parallelism.pp_size={at.pp} with parallelism.pipeline.schedule={schedule} makes {stages} stages, but "
                f"model.layers={model.layers}\n"
                f"  try: parallelism.pp_size={max(1, model.layers // stages_per_rank(schedule))}"
            )
        if config.pipeline.split != "auto":
            raise ConfigurationError(
                "parallelism.pipeline.split names modules, which a model of numbers does not have\n"
                "  try: parallelism.pipeline.split=auto"
            )
        if model.tied:
            raise ConfigurationError(
                f"model.tied=true, but parallelism.pp_size={at.pp}: embedding and head are in different stages and cannot be "
                "one weight, so parallelize refuses such a model\n  try: model.tied=false, or parallelism.pp_size=1"
            )
    calls_of(model, at, config)
