"""One training step's forward and backward, the same call with and without a pipeline.

for step in accumulate(model, 4):
    loss = forward_backward(model, *batch(step), loss_fn)
optimizer.step()
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .. import _compat
from ..errors import ConfigurationError
from . import inference
from .pipeline import PipelinedModel

__all__ = ["accumulate", "as_call", "forward_backward"]

_log = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class _Share:
    """Where a call stands among those whose gradients add up."""

    steps: int = 1
    is_last: bool = True


_shares: WeakKeyDictionary[nn.Module, _Share] = WeakKeyDictionary()


def forward_backward(model: nn.Module, inputs: Any, targets: Any, loss_fn: LossFunction) -> Tensor:
    """Run forward and backward on this data rank's batch; gradients are left in ``.grad``, averaged over the data ranks.

    With a pipeline the batch goes through it in ``pipeline.microbatches`` equal parts along dim 0. The ranks of one pipeline
    must be given the same batch, which reading it by ``context.dp_rank`` does. The first batch of a new shape costs a trial
    run, so pad batches to few shapes.

    Collective: call on all ranks.

    Args:
        model: What :func:`hydra_parallelism.parallelize` returned, or any module.
        inputs: A tensor, or a tuple of positional or a mapping of keyword arguments of the model.
        targets: What ``loss_fn`` compares with: a tensor or containers of tensors, whose dim 0 is the batch.
        loss_fn: ``loss_fn(output, targets)`` -> mean over the samples it is given, a scalar. It is called once for each
            micro-batch, so a mean with uneven weights (ignored tokens, say) weighs micro-batches equally.

    Returns:
        Mean loss of this data rank, on every rank of its pipeline, detached.

    Raises:
        ConfigurationError: The batch does not divide into micro-batches, or the model cannot be run in stages, or
            it was parallelized for the two branches of ``cfg_parallel=2``.
    """
    inference.refuse_training(model)
    share = _shares.get(model, _Share())
    args, kwargs = as_call(inputs)
    if isinstance(model, PipelinedModel):
        return model.run_step(args, kwargs, targets, loss_fn, steps=share.steps, synchronize=share.is_last)
    with _quiet(model, share):
        loss = loss_fn(model(*args, **kwargs), targets)
        (loss / share.steps).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def accumulate(model: nn.Module, steps: int) -> Iterator[int]:
    """Count the calls of :func:`forward_backward` whose gradients go into one optimizer step.

    Gradients come out as the mean over the calls, and are reduced over the data ranks in the last one only. Until then FSDP
    keeps them unsharded, which costs the memory of one full copy. A loop that is left early drops them, and says so.

    Example:
        >>> for step in accumulate(model, 4):
        ...     loss = forward_backward(model, *batches[step], loss_fn)

    Raises:
        ConfigurationError: ``steps`` is below 1.
    """
    if steps < 1:
        raise ConfigurationError(f"accumulate(model, steps={steps}): a step of the optimizer needs a batch\n  try: steps=1")
    return _count(model, steps)


def _count(model: nn.Module, steps: int) -> Iterator[int]:
    is_last = True
    try:
        for step in range(steps):
            is_last = step == steps - 1
            _shares[model] = _Share(steps, is_last)
            _synchronize(model, is_last)
            yield step
    finally:  # also when the loop is left early
        _shares.pop(model, None)
        _synchronize(model, True)
        if not is_last:
            _drop(model, f"accumulate(model, {steps}) was left after {step + 1} calls")


def _synchronize(model: nn.Module, on: bool) -> None:
    if isinstance(model, PipelinedModel):
        return  # told with each step
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(on, recurse=False)


def _drop(model: nn.Module, why: str) -> None:
    """Forget gradients that have not been reduced: the next step would add its own to them, on one rank's data."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        _compat.forget_unreduced(module)
        module.reshard()
    if sharded:
        _log.warning("%s, before gradients are reduced: those so far are dropped", why)


def _quiet(model: nn.Module, share: _Share) -> AbstractContextManager[Any]:
    """DDP's way of not reducing; it must surround the forward as well."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not share.is_last else nullcontext()


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments out of what stands for a call: a tensor, a tuple or a mapping."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
