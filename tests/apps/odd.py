"""A task that returns, raises and leaves in odd ways."""

import gc
import sys

import _app
import hydra
from omegaconf import DictConfig


class Odd(Exception):
    """Neither its text nor its representation can be had."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


@hydra.main(config_path="conf", config_name="odd", **_app.HYDRA)
def main(config: DictConfig) -> object:
    if config.kind.startswith("count"):
        gc.collect()
        return sum(type(thing) is DictConfig for thing in gc.get_objects())
    if config.kind == "repr":
        return Odd()
    if config.kind == "mute":
        raise Odd
    if config.kind == "quit":
        sys.exit(3)
    if config.kind == "leave":
        sys.exit(0)
    return 1.0


if __name__ == "__main__":
    main()
