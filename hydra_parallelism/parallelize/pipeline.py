"""The pipeline axis: stages on the ranks along ``pp``, micro-batches through them by torch's schedules.

Three steps, so that the other axes can be applied to each stage in between, as the whole of a model would be:

1. :func:`plan_pipeline` judges: schedule, micro-batches, which unit goes to which stage, parameters that two would share.
2. :func:`cut` takes from the model what the stages of this rank hold.
3. :class:`PipelinedModel` makes the stages run.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .. import _compat
from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from ..topology import Topology
from .flow import Flow
from .merge import adopt
from .part import Call, Part
from .relay import Relay
from .stages import Unit, choose_microbatches, divide, rank_of, splits_backward, stages_of
from .stand_ins import Judge
from .units import cut_out, find_units, furnish, refuse_shared, take_shapes

if TYPE_CHECKING:
    from .schedule import Run

__all__ = ["Cut", "PipelinePlan", "PipelinedModel", "cut", "plan_pipeline"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut, settled before it is."""

    units: tuple[Unit, ...]
    """In the order in which they run."""
    division: tuple[tuple[str, ...], ...]
    """Names of the units of each stage."""
    schedule: str
    """Name of the schedule, as torch spells it."""
    microbatches: int
    pp: int
    key: str
    """Dotted path of the config, for messages."""
    is_default: bool = False
    """Whether nobody said how many micro-batches."""


@dataclass(frozen=True)
class Cut:
    """What one rank keeps of a model."""

    plan: PipelinePlan
    parts: dict[int, nn.Module]
    """Stage -> the part of the model that it holds, for the stages of this rank, first to last."""
    skeleton: nn.Module
    """The model without any unit."""
    shapes: Mapping[str, nn.Module | Tensor]
    """Unit -> its copy without storage."""


def plan_pipeline(model: nn.Module, config: ParallelismConfig, topology: Topology, key: str = "parallelism") -> PipelinePlan:
    """Settle how a model is cut. Pure, and the same on every rank.

    Raises:
        ConfigurationError: Too few blocks, a split that names a module twice or not at all, a number of micro-batches that the
            schedule cannot run, or a parameter that two stages would share.
    """
    schedule, pp = config.pipeline.schedule.name, topology.pp
    microbatches = choose_microbatches(config.pipeline.microbatches, schedule, pp, key)
    units = find_units(model, config.pipeline.split, key)
    division = divide(units, config.pipeline.split, schedule, pp, key)
    refuse_shared(model, division, key)
    is_default = config.pipeline.microbatches is None
    return PipelinePlan(tuple(units), division, schedule, microbatches, pp, key, is_default)


def cut(model: nn.Module, plan: PipelinePlan, context: ParallelContext) -> Cut:
    """Take what the stages of this rank hold. The model is used up: its modules are in the parts, under their old names.

    Where another stage has a unit, a part has ``None`` until :class:`PipelinedModel` is made.
    """
    shapes = take_shapes(model, plan.units)
    mine = stages_of(context.coordinate["pp"], plan.schedule, plan.pp)
    parts = {stage: cut_out(model, plan.units, plan.division[stage]) for stage in mine}
    return Cut(plan, parts, cut_out(model, plan.units, ()), shapes)


class PipelinedModel(nn.Module):
    """The stages of this rank. Its parameters have the names that they have in the whole model.

    Train it with :func:`hydra_parallelism.forward_backward`. Calling it runs forward only, under ``torch.no_grad()``.
    """

    def __init__(self, pieces: Cut, context: ParallelContext, judge_block: Judge | None = None) -> None:
        """Make the stages run, after the other axes have been applied to each of ``pieces.parts``.

        Args:
            pieces: What this rank keeps of the model.
            context: The context.
            judge_block: Asked on every rank about each new kind of call of the first block, before anything is sent.
        """
        super().__init__()
        plan = self.pipeline_plan = pieces.plan
        self._context, self._group = context, context.mesh["pp"].get_group()
        bare = [unit.name for unit in plan.units if unit.is_bare]
        stand_ins = furnish(pieces.skeleton, plan.units, pieces.shapes, context.device)
        for name in [unit.name for unit in plan.units if unit.is_block][:1]:
            stand_ins[name].judge = judge_block
        self._flow = (Flow(pieces.skeleton, stand_ins, bare, plan.division, plan.key),)  # a tuple hides its modules
        self._parts = tuple(self._furnish(stage, module, pieces) for stage, module in pieces.parts.items())
        self._is_end = len(plan.division) - 1 in pieces.parts
        self._end_rank = rank_of(len(plan.division) - 1, plan.schedule, plan.pp)
        self._relay = Relay(self._parts, lambda stage: rank_of(stage, plan.schedule, plan.pp), self._group, context.device)
        self._slots: dict[Any, dict[int, tuple[int, ...]]] = {}
        self._run: Run | None = None
        self._unreduced = False
        self._keep_gathered()
        self._assemble()

    def _keep_gathered(self) -> None:
        """Schedules that run the backward of inputs and of weights apart find no weights where FSDP has freed them between.

        Torch then leaves out their gradients without a word (2.13: ``stage_backward_input`` asks for the parameters before
        FSDP's hooks have gathered them).
        """
        schedule, key = self.pipeline_plan.schedule, self.pipeline_plan.key
        if not splits_backward(schedule):
            return
        sharded = [module for part in self._parts for module in part.module.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_reshard_after_forward(False, recurse=False)
        if sharded and self._context.config.fsdp.reshard_after_forward and self._context.rank == 0:
            _log.info("%s.pipeline.schedule=%s needs %s.fsdp.reshard_after_forward=false, and has it", key, schedule, key)

    def _furnish(self, stage: int, module: nn.Module, pieces: Cut) -> Part:
        plan, first = self.pipeline_plan, self._flow[0].first
        gaps = [unit for unit in plan.units if unit.name not in plan.division[stage]]
        stand_ins = furnish(module, gaps, pieces.shapes, self._context.device)
        part = Part(
            stage,
            module,
            entry=module.get_submodule(first[stage]) if stage else None,
            exit=stand_ins[first[stage + 1]] if stage + 1 < len(first) else None,
        )
        part.hook()
        return part

    def _assemble(self) -> None:
        """Make this the tree of modules that the stages hold together."""
        for of in (self.named_children, self.named_parameters, self.named_buffers):
            for name in [name for name, _ in of() if "." not in name]:
                delattr(self, name)
        for part in self._parts:
            adopt(self, part.module, self.pipeline_plan.division[part.index], self.pipeline_plan.units)
        adopt(self, self._flow[0].skeleton, (), self.pipeline_plan.units)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "PipelinedModel":
        """Give what is on ``meta`` storage, in every stage."""
        for part in self._parts:
            part.module.to_empty(device=device, recurse=recurse)
        self._assemble()
        return self

    def reshard(self) -> None:
        """Have every stage free the parameters that FSDP has gathered, as ``FSDPModule.reshard`` does."""
        for part in self._parts:
            for module in part.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages that this rank holds."""
        return tuple(part.index for part in self._parts)

    def train(self, mode: bool = True) -> "PipelinedModel":
        """Set training mode, also of what is on every stage, such as dropout."""
        super().train(mode)
        for part in getattr(self, "_parts", ()):
            part.module.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole model for this data rank's batch, on every rank of its pipeline.

        Collective: call on all ranks, under ``torch.no_grad()``.

        Raises:
            ConfigurationError: Gradients are enabled, or the batch does not divide into micro-batches.
        """
        if torch.is_grad_enabled():
            raise ConfigurationError(
                f"a model in {len(self.pipeline_plan.division)} pipeline stages has no output to call backward() on: "
                "each stage runs its own backward as the schedule says\n"
                "  try: loss = hydra_parallelism.forward_backward(model, inputs, targets, loss_fn), or torch.no_grad() around "
                "the call"
            )
        if self._context.world.simulated:
            raise ConfigurationError(
                f"a simulated rank of a pipeline ({self._context.world.source()}) trains its stages, but has no output of the "
                f"whole model to return: the other stages are not there\n"
                "  try: hydra_parallelism.forward_backward, or no evaluation when context.world.simulated"
            )
        call = self._judge(args, kwargs)
        self._begin(call)
        return self._share(self._relay.run(call, self.pipeline_plan.microbatches))

    def run_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any, loss_fn: Any, *, steps: int, synchronize: bool
    ) -> Tensor:
        """What :func:`hydra_parallelism.forward_backward` does with a pipeline. Collective: call on all ranks."""
        call = self._judge(args, kwargs)
        self._begin(call)
        if self._run is None or self._run.signature != call.signature:
            from .schedule import Run  # late: it imports much of torch

            plan, device = self.pipeline_plan, self._context.device
            about = plan.schedule, plan.microbatches, len(plan.division)
            self._run = Run(self._parts, call, *about, self._group, device, self._flow[0].passed)
        losses = self._run.step(call, targets, loss_fn, steps, synchronize, self._unreduced)
        self._unreduced = not synchronize
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=self._context.device)
        dist.broadcast(loss, group=self._group, group_src=self._end_rank)
        return loss

    def _judge(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call, count = Call.of(args, kwargs), self.pipeline_plan.microbatches
        if call.batch % count or not call.batch:
            divisors = [n for n in range(1, call.batch + 1) if call.batch % n == 0]
            nearest = min(divisors, key=lambda n: (abs(n - count), -n), default=1)
            key, default = self.pipeline_plan.key, " (null: twice the stages)" if self.pipeline_plan.is_default else ""
            raise ConfigurationError(
                f"{key}.pipeline.microbatches={count}{default} does not divide the batch of {call.batch} samples that this "
                f"data rank has in one call, and the parts must be equal\n"
                f"  try: {key}.pipeline.microbatches={nearest}, or {max(1, -(-call.batch // count)) * count} samples a call"
            )
        return call

    def _begin(self, call: Call) -> None:
        """Tell the stages what they will be called with, and check the flow between them when that is new."""
        signature = (call.signature, self.training)
        if signature not in self._slots:
            self._slots[signature] = self._flow[0].trace(*call.first(self.pipeline_plan.microbatches), training=self.training)
        slots = self._slots[signature]
        for part in self._parts:
            part.call = call
            part.entry_slots = slots.get(part.index, ())
            part.exit_slots = slots.get(part.index + 1, ())

    def _share(self, output: Any) -> Any:
        """Give every rank of the pipeline the output of the last stage."""
        header: list[Any] = [None]
        tensors: list[Tensor] = []
        if isinstance(output, ConfigurationError):
            header = [output]
        elif self._is_end:
            leaves, spec = _compat.flatten(output)
            leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
            tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
            shapes = [_Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            header = [self._refuse_whole(leaves) or _compat.unflatten(shapes, spec)]
        dist.broadcast_object_list(header, group=self._group, group_src=self._end_rank)
        if isinstance(header[0], ConfigurationError):
            raise header[0]
        leaves, spec = _compat.flatten(header[0])
        if not self._is_end:
            shapes = [leaf for leaf in leaves if isinstance(leaf, _Shape)]
            tensors = [torch.empty(shape.size, dtype=shape.dtype, device=self._context.device) for shape in shapes]
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=self._end_rank)
        found = iter(tensors)
        return _compat.unflatten([next(found) if isinstance(leaf, _Shape) else leaf for leaf in leaves], spec)

    def _refuse_whole(self, leaves: list[Any]) -> ConfigurationError | None:
        """A value that is no tensor cannot be put together out of micro-batches, unless it is the same in all."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                return ConfigurationError(
                    f"the output of the model holds something of type {type(leaf).__name__}, and each of the "
                    f"{self.pipeline_plan.microbatches} micro-batches makes one of its own\n"
                    "  try: an output of tensors (Transformers: use_cache=False)"
                )
        return None


@dataclass(frozen=True)
class _Shape:
    """In place of a tensor that follows."""

    size: torch.Size
    dtype: torch.dtype
