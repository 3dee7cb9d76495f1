"""``--local-rank=N`` on the command line, as ``torch.distributed.launch`` and many old job scripts append it."""

import os

__all__ = ["strip"]

_SPELLINGS = ("--local-rank", "--local_rank")


def strip(arguments: list[str]) -> None:
    """Take the option out of a command line, in place; its value becomes ``LOCAL_RANK`` where that is not set."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name not in _SPELLINGS:
            kept.append(argument)
            continue
        os.environ.setdefault("LOCAL_RANK", value or next(rest, "0"))
    arguments[:] = kept
