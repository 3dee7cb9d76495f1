"""A Hydra app that says who it is: one BODY line for each rank, made of a real all-reduce over the data axis."""

import os
import sys
import time

import _app
import hydra
from omegaconf import DictConfig

time.sleep(float(os.environ.get("DELAY", 0)) * int(os.environ.get("RANK", 0)))

# One rank that was started with another override, as by a stale shell on one node.
if os.environ.get("RANK") == os.environ.get("ODD_RANK", "none"):
    sys.argv.append(os.environ["ODD_OVERRIDE"])


@hydra.main(config_path="conf", config_name="say", **_app.HYDRA)
def main(config: DictConfig) -> float:
    import torch
    import torch.distributed as dist

    import hydra_parallelism

    context = hydra_parallelism.current()
    total = torch.full((1,), float(context.rank))
    dist.all_reduce(total, group=context.mesh["dp"].get_group())
    degrees = " ".join(f"{axis}={size}" for axis, size in context.topology.degrees().items() if size > 1)
    _app.say(f"BODY rank {context.rank} dp_rank {context.dp_rank} sum {total.item():g} [{degrees}] lr {config.lr}")
    if config.fail:
        raise ValueError(config.fail)
    return float(total.item())


if __name__ == "__main__":
    main()
