"""Three jobs, three layouts, one after the other in the same processes."""

import _app
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hydra_parallelism import parallel_context
from hydra_parallelism._compat import registered_groups

LAYOUTS = [{"dp_shard": 4}, {"dp_shard": 2, "tp_size": 2}, {"dp_replicate": 2, "tp_size": 2}]


def main() -> None:
    """Use collectives and DTensor (whose caches outlive a mesh) in each job."""
    for number, layout in enumerate(LAYOUTS):
        with parallel_context(layout) as context:
            mesh, group = context.mesh["tp"], context.topology.group("tp", context.rank)
            total = torch.tensor([float(context.rank)])
            dist.all_reduce(total, group=mesh.get_group())
            assert total.item() == sum(group)
            full = torch.arange(8.0).view(4, 2) + 100 * number + 10 * context.dp_rank
            sharded = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            assert torch.equal((sharded + 1).redistribute(placements=[Replicate()]).to_local(), full + 1)
            del mesh, sharded
        _app.say(f"BODY job {number} left {registered_groups()} groups")


if __name__ == "__main__":
    main()
