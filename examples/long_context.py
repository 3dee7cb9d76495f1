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
    import training  # here, because it imports torch: --cfg, --help and tab completion answer without

    numbers = training.train(cfg)
    numbers["memory_mb"] = measure_memory()
    return numbers


def measure_memory() -> float:
    """Megabytes at the peak of the rank that needed most: of its accelerator, or of its process with Python and torch in it."""
    import torch
    import torch.distributed as dist

    context = hydra_parallelism.current()
    on_device = context.device.type == "cuda"
    kilobytes = torch.cuda.max_memory_allocated() // 1024 if on_device else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = torch.tensor(float(kilobytes), device=context.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if context.rank == 0:
        logger.info("%d rank(s) for each sequence: %.0f MB at the peak of a rank", context.topology.cp, most.item() / 1024)
    return most.item() / 1024


if __name__ == "__main__":
    main()
