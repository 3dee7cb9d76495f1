"""Train a small GPT on real text under any layout of the data, tensor and pipeline axes.

python examples/train.py                                       # one process
torchrun --nproc-per-node 4 examples/train.py                  # DDP over 4
torchrun --nproc-per-node 4 examples/train.py parallelism=two_by_two
python examples/train.py -m +sweep=layouts hydra.launcher.nproc_per_node=4    # which layout is the fastest?
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

_HERE = str(Path(__file__).resolve().parent)

# Hydra 1.3 warns when version_base is left out. 1.4 warns when it is given, and when a config names a callback class that the
# app has not whitelisted.
_HYDRA: dict[str, Any] = (
    {"version_base": None}
    if hydra.__version__.startswith("1.3")
    else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]}
)


@hydra.main(config_path="../conf", config_name="config", **_HYDRA)
def main(cfg: DictConfig) -> dict[str, float]:
    """Train, and return numbers for sweeps: ``loss`` and ``tokens_per_s``."""
    if _HERE not in sys.path:  # submitit runs the task in a process that does not know the script's folder
        sys.path.insert(0, _HERE)
    import training  # here, because it imports torch: --cfg, --help and tab completion answer without

    return training.train(cfg)


if __name__ == "__main__":
    main()
