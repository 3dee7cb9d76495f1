"""What one rank works with: its part of the parameters, and how often it computes in a step. Pure."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config import ParallelismConfig
from ..constraints import ModelConstraints, violations
from ..errors import ConfigurationError
from ..topology import Topology
from .model import Model
from .schedules import divide, microbatches_of, stages_of, stages_per_rank

__all__ = ["Share", "calls_of", "compute_bytes", "fitted", "fullest", "share_of"]

_NAMES = {"num_heads": "heads", "seq_len": "sequence", "num_experts": "experts"}


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
    """Calls of ``forward_backward`` whose gradients make one step, as ``accumulate`` counts them, of a fitted model."""
    if model.batch is None or model.micro_batch is None:
        return 1
    return max(1, model.batch // (at.dp * model.micro_batch * microbatches_of(config.pipeline, at.pp)))


def fitted(model: Model, at: Topology, config: ParallelismConfig) -> Model:
    """The model with its ``micro_batch`` settled; what ``parallelize`` refuses to run, or is not known here, is not priced.

    Raises:
        ConfigurationError: All that is wrong: numbers that degrees do not divide, too few blocks for the stages, tied weights
            in a pipeline, an explicit split, a batch that does not divide.
    """
    problems = [*_indivisible(model, at, config), *_experts(at, config), *(_pipeline(model, at, config) if at.pp > 1 else ())]
    problems += _batch(model, at, config)
    if problems:
        raise ConfigurationError("\n  ".join(["the model does not go with the layout:", *problems]))
    if model.batch is None or model.micro_batch is not None:
        return model
    return replace(model, micro_batch=model.batch // (at.dp * microbatches_of(config.pipeline, at.pp)))


def _batch(model: Model, at: Topology, config: ParallelismConfig) -> Iterator[str]:
    count = microbatches_of(config.pipeline, at.pp)
    factors = {"dp": at.dp, "micro-batches of the pipeline": count, "model.micro_batch": model.micro_batch or 1}
    taken = math.prod(factors.values())
    if model.batch is not None and model.batch % taken:
        said = " * ".join(f"{name}={value}" for name, value in factors.items() if value > 1)
        yield f"model.batch={model.batch} does not divide by {said} = {taken}"


def _indivisible(model: Model, at: Topology, config: ParallelismConfig) -> Iterator[str]:
    experts = model.experts if model.experts > 1 else None
    numbers = ModelConstraints(num_heads=model.heads, seq_len=model.sequence, num_experts=experts)
    for reason in violations(at, numbers, config.enable_sequence_parallel):
        yield _named(reason)
    split = {"vocab": model.vocab, **({} if experts else {"ffn": model.ffn})}
    split |= {} if model.kv_heads == model.heads else {"kv_heads": model.kv_heads}
    for name, value in split.items():
        if value % at.tp:
            yield f"model.{name}={value} does not divide by parallelism.tp_size={at.tp}"


def _named(reason: str) -> str:
    """With the names that the model's node has for the numbers."""
    return re.sub(rf"^({'|'.join(_NAMES)})=", lambda match: f"model.{_NAMES[match[1]]}=", reason)


def _experts(at: Topology, config: ParallelismConfig) -> Iterator[str]:
    if at.ep > 1 and at.tp > 1 and at.ep != at.tp and not config.enable_sequence_parallel:
        yield (
            f"parallelism.ep_size={at.ep} with parallelism.tp_size={at.tp}: the tp ranks have the same tokens, which only "
            "ep_size=tp_size or parallelism.enable_sequence_parallel=true makes use of"
        )


def _pipeline(model: Model, at: Topology, config: ParallelismConfig) -> Iterator[str]:
    schedule = config.pipeline.schedule.name
    stages = at.pp * stages_per_rank(schedule)
    if model.layers < stages:
        yield f"model.layers={model.layers} is less than the {stages} stages of parallelism.pp_size={at.pp} under {schedule}"
    if config.pipeline.split != "auto":
        yield "parallelism.pipeline.split names modules, which numbers do not have; try parallelism.pipeline.split=auto"
    if model.tied:
        yield (
            f"model.tied=true, but with parallelism.pp_size={at.pp} embedding and head are in two stages and cannot be one "
            "weight; try model.tied=false"
        )
