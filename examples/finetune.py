"""Fine-tune a Transformers model on real text under any preset: DDP, FSDP, HSDP, tensor and pipeline parallelism.

python examples/finetune.py                                    # a tiny Llama, one process
torchrun --nproc-per-node 4 examples/finetune.py parallelism=fsdp_tp parallelism.enable_sequence_parallel=true
torchrun --nproc-per-node 4 examples/finetune.py parallelism=pp_fsdp llm=qwen3
torchrun --nproc-per-node 4 examples/finetune.py parallelism=fsdp checkpoint=FOLDER    # what save_pretrained() wrote
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


@hydra.main(config_path="../conf", config_name="finetune", **_HYDRA)
def main(cfg: DictConfig) -> dict[str, float]:
    """Fine-tune, and return numbers for sweeps: ``loss`` and ``tokens_per_s``."""
    if _HERE not in sys.path:  # submitit runs the task in a process that does not know the script's folder
        sys.path.insert(0, _HERE)
    import finetuning  # here, because it imports torch: --cfg, --help and tab completion answer without

    return finetuning.finetune(cfg)


if __name__ == "__main__":
    main()
