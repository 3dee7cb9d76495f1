"""A default process group that the user made stays, whatever the plugin does beside it."""

import _app
import torch
import torch.distributed as dist

from hydra_parallelism import parallel_context
from hydra_parallelism._compat import registered_groups


def main() -> None:
    """Two contexts inside the user's own group; it works before, between and after them."""
    dist.init_process_group("gloo")
    mine = dist.new_group([0, 1, 2, 3])
    for layout in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}):
        with parallel_context(layout) as context:
            assert context.mesh["dp"].get_group() is dist.group.WORLD
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.all_reduce(total, group=mine)
        _app.say(f"BODY rank {dist.get_rank()} {total.item():g} {registered_groups()} groups")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
