"""A task in which one rank meets the fate it is told, while its peers wait for it in a collective."""

import logging
import os
import signal
import sys
import time

import _app
import hydra
from omegaconf import DictConfig

import hydra_parallelism

log = logging.getLogger(__name__)


@hydra.main(config_path="conf", config_name="fate", **_app.HYDRA)
def main(config: DictConfig) -> float:
    import torch
    import torch.distributed as dist

    context = hydra_parallelism.current()
    _app.say(f"BODY rank {context.rank} pid {os.getpid()} value {config.value}")
    log.info("at work")
    print("printed", flush=True)
    dist.barrier()  # every rank has said so before one of them ends all
    if config.ignore and context.rank != config.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.fate == "sleep":
        time.sleep(300)
    if context.rank == config.rank and (not config.once or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        meet(config.fate, context.rank)
    total = torch.tensor([float(config.value)])
    dist.all_reduce(total)
    time.sleep(config.seconds)
    return total.item() / context.world_size


class Mute(Exception):
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError


def meet(fate: str, rank: int) -> None:
    if fate == "raise":
        raise ValueError(f"boom-{rank}")
    if fate == "exit":
        os._exit(3)
    if fate == "quit":
        sys.exit(4)
    if fate == "oom":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if fate == "base":
        raise GeneratorExit(f"base-{rank}")
    if fate == "mute":
        raise Mute
    if fate == "word":
        sys.exit("a last word")
    if fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
    _app.say("AFTER main")
