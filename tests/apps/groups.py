"""Build one layout on real ranks and report, as one JSON line for each rank, what groups there are and that they work."""

import json
import sys
from datetime import timedelta

import _app
import torch
import torch.distributed as dist

from hydra_parallelism import parallel_context
from hydra_parallelism._compat import registered_groups
from hydra_parallelism.topology import AXES

VIEWS = [("dp_replicate", "fsdp"), ("ring", "ulysses"), ("pp", "dp", "tp"), ("efsdp", "ep"), ("dp_replicate", "dp_shard")]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that collectives on CPU tensors of a group have."""
    return group._get_backend(torch.device("cpu")).options._timeout


def main() -> None:
    """Report on the layout given as JSON in the first argument."""
    config = json.loads(sys.argv[1])
    with parallel_context({**config, "runtime": {"timeout_s": 77}}) as context:
        groups = {axis: context.mesh[axis].get_group() for axis in AXES}
        sums = {}
        for axis, group in groups.items():
            total = torch.tensor([float(context.rank)])
            dist.all_reduce(total, group=group)
            sums[axis] = total.item()
        before = registered_groups()
        same = all(context.mesh[name] is context.mesh[name] for name in [*AXES, *VIEWS])
        report = {
            "rank": context.rank,
            "registered": before,
            "registered_after_asking_again": registered_groups(),
            "same_objects": same,
            "members": {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()},
            "sums": sums,
            "world_is_default": {axis: group is dist.group.WORLD for axis, group in groups.items()},
            "timeouts": sorted({timeout_of(group).total_seconds() for group in groups.values()}),
            "self_groups": len({id(group) for group in groups.values() if group.size() == 1}),
        }
        del groups, group
    report["registered_after_shutdown"] = registered_groups()
    _app.say(f"BODY {json.dumps(report)}")


if __name__ == "__main__":
    main()
