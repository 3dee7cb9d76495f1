"""The Hydra app that the doctor starts: one all-reduce, on processes that the library starts as it starts any others."""

import time
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

__all__ = ["SIGN", "main"]

SIGN = "all-reduce:"
"""Begins the line that rank 0 prints: the sum, how many ranks there were, the backend and the seconds of the second one."""

_HYDRA: dict[str, Any] = (
    {"version_base": None}
    if hydra.__version__.startswith("1.3")
    else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]}
)
ConfigStore.instance().store("doctor", {"defaults": [{"parallelism": "ddp"}, "_self_"]})


@hydra.main(config_path=None, config_name="doctor", **_HYDRA)
def main(config: DictConfig) -> None:
    """Sum the numbers of the ranks. Collective."""
    import torch
    import torch.distributed as dist

    from ..runtime import current

    context = current()
    for _ in range(2):  # the first one connects
        total = torch.tensor([float(context.rank)], device=context.device)
        began = time.perf_counter()
        dist.all_reduce(total)
        value = total.item()
    if context.rank == 0:
        print(SIGN, value, context.world_size, context.backend, time.perf_counter() - began, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
