"""The exceptions of this library.

Every message is one string that says what is wrong, with the numbers, and what to type instead. The classes derive from
``CompactHydraException`` so that Hydra prints the message without a traceback (``HYDRA_FULL_ERROR=1`` brings it back), and
they hold nothing but that string, so that they survive pickling on their way from a worker to the process that started it.
"""

from hydra.errors import CompactHydraException

__all__ = ["ConfigurationError", "LaunchError", "ParallelismError"]


class ParallelismError(CompactHydraException):
    """Base of everything this library raises on purpose."""

    announced: bool = False
    """Whether some rank has printed the message already, so that this one need not."""


class ConfigurationError(ParallelismError, ValueError):
    """What the user wrote does not describe a layout, or not one that fits the processes at hand."""


class LaunchError(ParallelismError, RuntimeError):
    """The processes or devices that a layout needs are not there, or do not agree with each other."""
