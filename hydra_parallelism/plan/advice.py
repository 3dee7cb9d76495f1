"""What a layout does to gradients, and what about it is likely to be a mistake. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..constraints import CONSTRAINTS_KEY, violations
from .case import Case
from .placement import stays_inside

__all__ = ["Reduction", "reductions", "warnings_of"]


@dataclass(frozen=True)
class Reduction:
    """One collective that gradients pass, as ``parallelize`` sets it up."""

    of: str
    """Whose gradients."""
    operation: str
    axis: str
    size: int


def reductions(case: Case) -> list[Reduction]:
    """Who reduces gradients over what, in the order it happens. Empty for inference and for a single process.

    Within a unit FSDP2 reduce-scatters over the ranks that share a copy, then all-reduces the shards over the copies. Experts
    have axes of their own. Under sequence parallelism a weight that every ``tp`` rank holds whole sees part of the tokens on
    each, so its gradient is summed over ``tp``.
    """
    if case.config.inference:
        return []
    at, found = case.topology, list[Reduction]()
    if at.tp > 1 and case.config.enable_sequence_parallel:
        found.append(Reduction("weights that tp does not split", "all-reduce", "tp", at.tp))
    shared = "all weights" if at.ep == 1 else "all but experts"
    found.append(Reduction(shared, "reduce-scatter", "fsdp", at.fsdp))
    if at.ep > 1:
        found.append(Reduction("experts", "reduce-scatter", "efsdp", at.efsdp))
    found.append(Reduction("all weights", "all-reduce", "dp_replicate", at.dp_replicate))
    return [each for each in found if each.size > 1]


def warnings_of(case: Case) -> list[str]:
    """What deserves a second look, each with what to type instead where there is something."""
    return [*_straddling(case), *_replicas_inside(case), *_nothing_shared(case), *_unused(case), *_constrained(case)]


def _straddling(case: Case) -> Iterator[str]:
    keys = {"tp": "tp_size", "ulysses": "context_parallel.ulysses_degree"}
    per_node = case.machine.per_node
    for axis, key in keys.items():
        size = case.topology.size(axis)
        if size == 1 or stays_inside(case.topology, axis, per_node):
            continue
        inner = 1 if axis == "tp" else case.topology.tp
        fits = max((n for n in range(1, size + 1) if size % n == 0 and per_node % (n * inner) == 0), default=1)
        yield (
            f"{axis} groups straddle nodes: {axis}={size}"
            f"{f' * tp={inner}' if inner > 1 else ''} ranks on nodes of {per_node}, and every layer waits for them; "
            f"try {case.key}.{key}={fits}"
        )


def _replicas_inside(case: Case) -> Iterator[str]:
    """Shards gather parameters twice a step and reduce gradients, replicas only reduce their shards of them."""
    at, per_node = case.topology, case.machine.per_node
    if at.dp_replicate == 1 or at.fsdp == 1:
        return
    if stays_inside(at, "dp_replicate", per_node) and not stays_inside(at, "fsdp", per_node):
        yield (
            f"replicas are inside a node while shards cross nodes (dp_replicate={at.dp_replicate}, fsdp={at.fsdp}, nodes of "
            f"{per_node}): what is gathered most often takes the slow links"
        )
    elif not stays_inside(at, "fsdp", per_node) and at.dp_shard > 1:
        inner = at.world_size // (at.pp * at.dp_replicate * at.dp_shard)
        fits = max((n for n in range(2, at.dp_shard) if at.dp_shard % n == 0 and per_node % (n * inner) == 0), default=0)
        if fits:  # otherwise what is inside of the shards fills the node
            yield (
                f"shards cross nodes although there are replicas (fsdp={at.fsdp} on nodes of {per_node}); "
                f"try {case.key}.dp_shard={fits} {case.key}.dp_replicate={at.dp // fits}"
            )


def _nothing_shared(case: Case) -> Iterator[str]:
    at = case.topology
    if at.world_size > 1 and at.dp == 1 and at.fsdp == 1 and at.pp == 1 and not case.config.inference:
        yield (
            f"dp_replicate=1 * dp_shard=1: all {at.world_size} ranks read the same batch and nothing is sharded by FSDP; "
            f"try {case.key}.dp_shard=-1 on more of them"
        )


def _unused(case: Case) -> Iterator[str]:
    machine, used = case.machine, case.topology.world_size
    idle = machine.accelerators - used
    if idle > 0 and (case.states_nodes or machine.nodes > 1):
        yield (
            f"{idle} of world.nodes={machine.nodes} * world.per_node={machine.per_node} = {machine.accelerators} accelerators "
            f"are unused: the degrees multiply to {used}; a job started on all of them would be refused"
        )


def _constrained(case: Case) -> list[str]:
    """What a sweep would leave this layout out for."""
    reasons = violations(case.topology, case.constraints, case.config.enable_sequence_parallel)
    return [f"{CONSTRAINTS_KEY} rule this layout out: {reason}" for reason in reasons]
