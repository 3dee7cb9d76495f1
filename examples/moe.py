"""Train a small GPT with a mixture of experts in each block, under any layout, the experts over ``ep``.

python examples/moe.py                                                # one process
python examples/moe.py parallelism=ep hydra.launcher.nproc_per_node=4       # the experts of a block over 4
python examples/moe.py parallelism=ep parallelism.dp_shard=4 parallelism.ep_size=2   # ... over 2, and each sharded over 2
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


@hydra.main(config_path="../conf", config_name="moe", **_HYDRA)
def main(cfg: DictConfig) -> dict[str, float]:
    """Train, and return numbers for sweeps: ``loss`` and ``tokens_per_s``."""
    if _HERE not in sys.path:  # submitit runs the task in a process that does not know the script's folder
        sys.path.insert(0, _HERE)
    import training  # here, because they import torch: --cfg, --help and tab completion answer without
    from mixture import MixtureGPT

    return training.train(cfg, MixtureGPT)


if __name__ == "__main__":
    main()
