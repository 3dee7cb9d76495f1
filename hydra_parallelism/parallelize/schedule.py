"""Running the stages of this rank by one of torch's schedules.

The only module that imports ``torch.distributed.pipelining``, which brings torch.export and its compiler along (0.6 s, less
where an optimizer has imported part of it): imported when a pipeline takes its first training step.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from .. import _compat, fake_groups
from .part import Call, Part

__all__ = ["Run"]


class Run:
    """A schedule for calls of one signature, with the buffers it holds."""

    def __init__(
        self,
        parts: tuple[Part, ...],
        call: Call,
        schedule: str,
        microbatches: int,
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device,
        passed: Mapping[int, tuple[Tensor, ...]],
    ) -> None:
        """Make torch's stages and schedule.

        Args:
            parts: The stages of this rank.
            call: A call of the kind that will be run.
            schedule: Name, as torch spells it.
            microbatches: Equal parts of a batch.
            num_stages: Of the whole pipeline.
            group: The ranks of the pipeline.
            device: Of this rank.
            passed: Stage -> likenesses of what it is sent; what a simulated rank, to which nobody says so, goes by.
        """
        self.signature = call.signature
        self._count, self._end = microbatches, parts[-1]
        self._is_end = self._end.index == num_stages - 1
        self._stages = [_Stage(part.module, part.index, num_stages, device, group=group) for part in parts]
        if fake_groups.is_fake(group):
            for stage in self._stages:
                stage.pretends = True
                _compat.tell_metadata(stage, passed.get(stage.stage_index, ()))
        kind = get_schedule_class(schedule)
        stages = self._stages if issubclass(kind, PipelineScheduleMulti) else self._stages[0]
        # Torch would divide gradients by the number of micro-batches after each step, those of earlier steps again and again.
        self._schedule = kind(stages, microbatches, loss_fn=self._loss, scale_grads=False)
        self._started = False
        self._targets: list[Any] = []
        self._loss_fn: Any = None
        self._divisor = 1
        self._losses: list[Tensor] = []

    def step(self, call: Call, targets: Any, loss_fn: Any, steps: int, synchronize: bool, unreduced: bool) -> list[Tensor]:
        """Losses of the micro-batches where this rank holds the last stage."""
        self._loss_fn, self._divisor = loss_fn, self._count * steps
        self._targets = _cut_targets(targets, self._count, call.batch)
        for stage in self._stages:
            stage.synchronizes = synchronize
            if not self._started:
                stage.lay_aside(unreduced=unreduced)
        self._started = True
        # The schedule hands out a number in place of targets, so that these may be anything.
        target = {"target": torch.arange(self._count)} if self._is_end else {}
        self._losses = []
        self._schedule.step(**call.whole, **target, return_outputs=False)
        losses, self._losses, self._targets, self._loss_fn = self._losses, [], [], None
        return losses[-self._count :]  # a schedule's first step begins with a trial

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        loss: Tensor = self._loss_fn(self._end.rebuild_output(output), self._targets[int(number)])
        told = loss.detach()
        self._losses.append((told.full_tensor() if isinstance(told, DTensor) else told).float())
        return loss / self._divisor


def _cut_targets(targets: Any, count: int, batch: int) -> list[Any]:
    leaves, spec = _compat.flatten(targets)
    pieces = [
        leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch else (leaf,) * count
        for leaf in leaves
    ]
    return [_compat.unflatten([piece[n] for piece in pieces], spec) for n in range(count)]


class _Stage(PipelineStage):
    """Torch's stage; its gradients are reduced over the data ranks only when told to, and a new schedule leaves them be."""

    synchronizes = True
    pretends = False
    """Whether what it receives is made up."""
    _aside: tuple[tuple[nn.Parameter, Tensor], ...] = ()

    def lay_aside(self, *, unreduced: bool) -> None:
        """Save the gradients of earlier steps from a schedule's first step.

        It begins with a trial run that measures shapes, after which torch clears the gradients of FSDP's parameters. Those that
        have not been reduced yet belong to the gathered parameters, which must be in place to be found.

        Args:
            unreduced: Whether there are such gradients.
        """
        gathered = [module for module in self.submod.modules() if isinstance(module, FSDPModule)]
        for module in gathered:
            module.set_requires_gradient_sync(False, recurse=False)  # the trial must not reduce what is there
        held = [parameter for parameter in self.submod.parameters() if parameter.grad is not None]
        for module in gathered if unreduced else ():
            module.unshard()
        held += [parameter for parameter in self.submod.parameters() if parameter.grad is not None]
        self._aside = tuple((parameter, parameter.grad) for parameter in dict.fromkeys(held) if parameter.grad is not None)
        for parameter, _ in self._aside:
            parameter.grad = None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by every schedule once all micro-batches are through."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._aside = ()
        if self.synchronizes:
            super().perform_reduce_grad(grad_scale_factor)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What a micro-batch waits for from the stage before."""
        return self._made_up(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What a micro-batch waits for from the stage behind."""
        return self._made_up(super().get_bwd_recv_ops(bwd_chunk_id))

    def _made_up(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations if self.pretends else ():
            fake_groups.pretend_to_receive(operation.tensor)
        return operations
