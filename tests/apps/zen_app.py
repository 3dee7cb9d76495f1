"""An app that starts by hydra-zen's ``launch``: one BODY line for each rank."""

from typing import Any

import _app
from hydra_zen import launch, make_config


def task(config: Any) -> None:
    """An all-reduce over the data axis."""
    import torch
    import torch.distributed as dist

    import hydra_parallelism

    context = hydra_parallelism.current()
    total = torch.full((1,), float(context.rank))
    dist.all_reduce(total, group=context.mesh["dp"].get_group())
    _app.say(f"BODY rank {context.rank} sum {total.item():g}")


if __name__ == "__main__":
    options = dict(_app.HYDRA)
    launch(
        make_config("parallelism", hydra_defaults=["_self_", {"parallelism": "fsdp"}]),
        task,
        overrides=["parallelism.dp_shard=2", "parallelism.runtime.log_ranks=all"],
        **options,
    )
