"""Which device a rank computes on, and which backend its groups use."""

import os
import socket

import torch

from .config import DeviceType
from .errors import ConfigurationError, LaunchError
from .world import World

__all__ = ["bind", "choose_backend", "choose_index", "choose_type", "identity"]


def choose_type(wanted: DeviceType, key: str) -> str:
    """``"cuda"`` or ``"cpu"``.

    Raises:
        ConfigurationError: CUDA was asked for and is not there.
    """
    available = torch.cuda.is_available()
    if wanted is DeviceType.cuda and not available:
        raise ConfigurationError(
            f"{key}.runtime.device_type=cuda, but torch {torch.__version__} sees no CUDA device "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})\n"
            f"  try: {key}.runtime.device_type=cpu"
        )
    return "cuda" if available and wanted is not DeviceType.cpu else "cpu"


def bind(device_type: str, world: World) -> torch.device:
    """Make the rank's device the current one, before anything else can touch another.

    Raises:
        LaunchError: Fewer devices are visible than ranks on this node need.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", choose_index(world, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def choose_index(world: World, visible: int) -> int:
    """Index of the device of a rank among the visible ones: its local rank, or 0 where each task is shown just one.

    Raises:
        LaunchError: The local rank is past the last device.
    """
    if visible == 1 or world.simulated:  # the other ranks of its node are not here to take the others
        return 0
    if world.local_rank >= visible:
        raise LaunchError(
            f"{world.source('local_rank')}, but only {visible} CUDA devices are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})\n"
            f"  try: start at most {visible} processes on this node, or parallelism.runtime.device_type=cpu"
        )
    return world.local_rank


def choose_backend(wanted: str | None, device_type: str, *, simulated: bool = False) -> str:
    """Backend of the process groups: NCCL with gloo for CPU tensors on CUDA, gloo on CPU, unless told otherwise.

    A simulated rank has torch's fake one, whatever is configured: there is nobody to talk to.
    """
    if simulated:
        return "fake"
    return wanted or ("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")


def identity(device: torch.device) -> str | None:
    """What names this device in the world, so that two ranks on one device are noticed; ``None`` on CPU."""
    if device.type == "cpu":
        return None
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
