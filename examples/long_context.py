"""Train on sequences of 32 thousand tokens, cut over the ranks: each holds its piece, attention sees the whole.

python examples/long_context.py                                                     # one process
python examples/long_context.py parallelism.context_parallel.ring_degree=4          # 4 processes
python examples/long_context.py -m parallelism.context_parallel.ring_degree=1,2,4   # and what each rank needs, in a table
torchrun --nproc-per-node 4 examples/long_context.py parallelism=usp parallelism.context_parallel.ulysses_degree=2
"""

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

import hydra_parallelism

_HERE = str(Path(__file__).resolve().parent)

# Hydra 1.3 warns when version_base is left out. 1.4 warns when it is given, and when a config names a callback class that the
# app has not whitelisted.
_HYDRA: dict[str, Any] = (
    {"version_base": None}
    if hydra.__version__.startswith("1.3")
    else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]}
)

logger = logging.getLogger(__name__)


@hydra.main(config_path="../conf", config_name="long_context", **_HYDRA)
def main(cfg: DictConfig) -> dict[str, float]:
    """Train, and return numbers for sweeps: ``loss``, ``tokens_per_s`` and ``memory_mb``."""
    if _HERE not in sys.path:  # submitit runs the task in a process that does not know the script's folder
        sys.path.insert(0, _HERE)
    # Here, because these import torch: --cfg, --help and tab completion answer without.
    import torch.distributed as dist

    import training

    context = hydra_parallelism.current()
    before = peak_mb(context.device)
    numbers = training.train(cfg)
    needed = [0.0] * context.world_size
    dist.all_gather_object(needed, peak_mb(context.device) - before)
    if context.rank == 0:
        by_rank = " ".join(f"{mb:.0f}" for mb in needed)
        logger.info("%d rank(s) share a sequence; MB for model and activations by rank: %s", context.topology.cp, by_rank)
    return {**numbers, "memory_mb": max(needed)}


def peak_mb(device: Any) -> float:
    """The most memory so far in megabytes: of the accelerator, or of the process with Python and torch in it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # kilobytes on Linux


if __name__ == "__main__":
    main()
