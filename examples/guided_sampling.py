"""Train a small generative model of digits, then sample from it with guidance, the two branches on two processes.

python examples/guided_sampling.py                                          # one process, both branches in one batch
python examples/guided_sampling.py parallelism=cfg parallelism.inference=true    # two processes, a branch each: the same bits
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


@hydra.main(config_path="../conf", config_name="guided_sampling", **_HYDRA)
def main(cfg: DictConfig) -> dict[str, float]:
    """Train and sample, and return numbers for sweeps: ``agreement`` and ``samples_per_s``."""
    if _HERE not in sys.path:  # submitit runs the task in a process that does not know the script's folder
        sys.path.insert(0, _HERE)
    import sampling  # here, because it imports torch: --cfg, --help and tab completion answer without

    return sampling.run(cfg)


if __name__ == "__main__":
    main()
