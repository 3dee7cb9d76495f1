"""What the test apps share."""

import os
from typing import Any

import hydra

# Hydra 1.4 deprecates version_base and wants callback targets whitelisted.
HYDRA: dict[str, Any] = (
    {"version_base": None}
    if hydra.__version__.startswith("1.3")
    else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]}
)


def say(text: str) -> None:
    """Write a line in one piece: print() of several processes interleaves within lines."""
    os.write(1, f"{text}\n".encode())
