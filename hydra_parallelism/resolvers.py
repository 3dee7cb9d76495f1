"""OmegaConf resolvers: the numbers of the topology, anywhere in an app's config.

* ``${parallelism:NAME}`` - any degree (``dp_shard``, ``tp``, ``tp_size``, ``ring_degree``, ...), derived size (``dp``,
  ``fsdp``, ``dp_world_size``, ...), or number of this process and its world (``world_size``, ``nnodes``,
  ``local_world_size``, ``rank``, ``local_rank``, ``node_rank``, ``dp_rank``, ``is_main``).
* ``${parallelism:NAME,path.to.node}`` - the same when the node is not at ``parallelism``.
* ``${parallelism.per_dp_rank:VALUE}`` - ``VALUE`` divided by ``dp_world_size``, exactly or not at all.
* ``${parallelism.nodes:PER_NODE}`` and ``${parallelism.per_node:PER_NODE}`` - how many nodes a job needs at ``PER_NODE``
  accelerators each, and how many processes then run on a node: for the launcher of a cluster, filled in before the job exists.

A resolver that needs no degrees (``nnodes``, ``local_world_size``, ``rank``, ...) reads none, so that a degree may itself be
``${parallelism:nnodes}``. Without a launcher the numbers are those of the planned world. Imports no torch.
"""

from typing import Any

import omegaconf
from omegaconf import OmegaConf

__all__ = ["register"]

NODE = "parallelism"
"""Where the node is unless a resolver is told otherwise."""


def register() -> None:
    """Make the resolvers known to OmegaConf. Harmless when done twice."""
    # OmegaConf 2.4 renamed the function; on 2.3 the new name exists and is the old string-only API, so choose by version.
    newer = tuple(int(part) for part in omegaconf.__version__.split(".")[:2]) >= (2, 4)
    put = OmegaConf.register_resolver if newer else OmegaConf.register_new_resolver
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            put(name, function)


# The answers are imported when first needed: every Hydra app in the environment registers the resolvers, few use them.


def _parallelism(name: Any, node: Any = NODE, *, _root_: Any) -> Any:
    from . import _answers

    return _answers.answer(name, str(node), _root_)


def _per_dp_rank(value: Any, node: Any = NODE, *, _root_: Any) -> Any:
    from . import _answers

    return _answers.per_dp_rank(value, str(node), _root_)


def _nodes(per_node: Any, node: Any = NODE, *, _root_: Any) -> Any:
    from . import _answers

    return _answers.nodes(per_node, str(node), _root_)


def _per_node(per_node: Any, node: Any = NODE, *, _root_: Any) -> Any:
    from . import _answers

    return _answers.on_each_node(per_node, str(node), _root_)


_RESOLVERS = {
    "parallelism": _parallelism,
    "parallelism.per_dp_rank": _per_dp_rank,
    "parallelism.nodes": _nodes,
    "parallelism.per_node": _per_node,
}
