"""What a simulated rank holds, in bytes: counted tensor by tensor, because the peak of a process says nothing about its share.

Parameters are those of the models that went through ``parallelize`` (or, if there are more, that optimizers have). Gradients
and optimizer state are seen when an optimizer has taken a step, which is when all three are there: a task that keeps the model
to itself has dropped them before the job ends.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import memory
from .world import World

__all__ = ["Holdings", "count"]

_log = logging.getLogger(__name__)


def count(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's part of some tensors; what is no tensor counts nothing, and what is on ``meta`` neither."""
    from torch.distributed.tensor import DTensor  # not at the top: jobs that are not simulated would all pay for it

    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total += local.numel() * local.element_size()
    return total


class Holdings:
    """Counts from :meth:`begin` to :meth:`end`.

    Attributes:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients at the last steps of the optimizers.
        optimizer: Bytes of their state then.
    """

    def __init__(self) -> None:
        self._of_models = 0
        self._of_optimizers: dict[int, tuple[int, int, int]] = {}
        self._hook: Any = None

    @property
    def parameters(self) -> int:
        """See the class."""
        return max(self._of_models, self._sum(0))

    @property
    def gradients(self) -> int:
        """See the class."""
        return self._sum(1)

    @property
    def optimizer(self) -> int:
        """See the class."""
        return self._sum(2)

    def begin(self) -> None:
        """Look at every optimizer that takes a step from here on."""
        self._hook = register_optimizer_step_post_hook(self._see)

    def add(self, model: nn.Module) -> None:
        """Count the parameters of a model."""
        self._of_models += count(model.parameters())

    def end(self, world: World, device_type: str) -> None:
        """Look at no optimizer any more, and tell."""
        self._hook.remove()
        text = f"parameters {_show(self.parameters)}"
        if self._of_optimizers:
            text += f", gradients {_show(self.gradients)}, optimizer state {_show(self.optimizer)}"
        else:
            text += ", and no optimizer took a step"
        where = "this process" if device_type == "cpu" else f"{device_type} memory"
        peak = _show(memory.peak(device_type))
        _log.info("rank %d of %d held %s; peak of %s %s", world.rank, world.size, text, where, peak)

    def _see(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = (value for parameter in parameters for value in optimizer.state.get(parameter, {}).values())
        gradients = (parameter.grad for parameter in parameters)
        self._of_optimizers[id(optimizer)] = count(parameters), count(gradients), count(state)

    def _sum(self, index: int) -> int:
        return sum(each[index] for each in self._of_optimizers.values())


def _show(size: int) -> str:
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):,.1f} {unit}"
    return f"{size} B"
