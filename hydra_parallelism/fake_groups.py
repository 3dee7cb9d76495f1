"""Torch's fake process groups, in which one rank is alone, and what stands for what it would receive.

From the tensors that a collective is given the fake backend copies what it can (an all-gather repeats this rank's part) and
leaves the rest as it is; a received tensor would be memory that nobody wrote.
"""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["is_fake", "pretend_to_receive", "register"]


def register() -> None:
    """Make the backend known to torch, which it is only once its module has been imported. Harmless when done twice."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the other ranks of a group, by default of the world, are only thought of."""
    return dist.get_backend(group) == "fake"


def pretend_to_receive(tensor: Tensor) -> Tensor:
    """Fill a tensor that another rank would send, in place: noise, so that a router still spreads tokens; integers are 0."""
    with torch.no_grad():
        return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
