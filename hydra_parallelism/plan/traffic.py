"""Bytes that a rank sends in one step, axis by axis, and how long that takes if nothing overlaps. Pure.

What is counted is what ``parallelize`` has torch do, collective by collective; ``benchmarks/estimates.py`` counts them in real
steps (docs/plan.md has the table). Not counted: clipping, and the loss, a number that a pipeline tells its ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..topology import Topology
from . import collectives
from .case import Case
from .collectives import Cost
from .machine import Link
from .memory import recomputed
from .model import Model
from .placement import stays_inside
from .schedules import microbatches_of, sends, splits_backward
from .share import Share, calls_of, compute_bytes, fitted, share_of

__all__ = ["Transfer", "traffic"]


@dataclass(frozen=True)
class Transfer:
    """One kind of collective along one axis, all of it in a step."""

    axis: str
    operation: str
    what: str
    count: float
    """How many of them."""
    cost: Cost
    """Of all of them, for one rank."""


@dataclass(frozen=True)
class _Unit:
    """FSDP units that are alike."""

    params: float
    """Of one of them, gathered."""
    count: int
    axis: str
    """Over which it is sharded."""
    freed: bool
    """Whether it is freed after forward."""


def traffic(case: Case, model: Model, rank: int) -> list[Transfer]:
    """What a rank sends in a step of training (of a forward pass under ``inference``), axes outermost first.

    Raises:
        ConfigurationError: The model does not go with the layout, see :func:`.share.fitted`.
    """
    return list(_Step(case, fitted(model, case.topology, case.config), rank).transfers())


@lru_cache(maxsize=64)
def _stays_inside(at: Topology, axis: str, per_node: int) -> bool:
    """Asked for several stages of a layout."""
    return stays_inside(at, axis, per_node)


class _Step:
    """The numbers that the axes share."""

    def __init__(self, case: Case, model: Model, rank: int) -> None:
        self.case, self.model = case, model
        self.at, self.config = case.topology, case.config
        self.index = self.at.index("pp", rank)
        self.share: Share = share_of(model, self.at, self.config, self.index)
        self.schedule = self.config.pipeline.schedule.name
        self.calls = 1 if self.config.inference else calls_of(model, self.at, self.config)
        self.count = microbatches_of(self.config.pipeline, self.at.pp) * self.calls
        """Micro-batches of the step."""
        self.size = compute_bytes(self.config)
        self.tokens = model.tokens / self.at.cp
        self.trained = not self.config.inference
        self.again = self.count * recomputed(self.config, self.share.blocks) if self.trained else 0
        """How often a block is run forward again, up to what its backward needs: the last sum is not done twice."""
        self.forwards = self.count * self.share.blocks + self.again
        """How often a block is run forward."""
        self.backwards = self.count * self.share.blocks if self.trained else 0
        self.sequence = self.config.enable_sequence_parallel and self.at.tp > 1

    def transfers(self) -> Iterator[Transfer]:
        for of_axis in (self._pp, self._replicas, self._shards, self._ring, self._ulysses, self._tp, self._ep):
            yield from (each for each in of_axis() if each.cost.wire_bytes)

    def _link(self, axis: str) -> Link:
        """That of the slowest group along an axis: for its ranks the others wait at the end of the step."""
        machine = self.case.machine
        inside = self.at.size(axis) == 1 or _stays_inside(self.at, axis, machine.per_node)
        return machine.intra if inside else machine.inter

    def _repeated(self, axis: str, operation: str, what: str, count: float, one: Cost) -> Transfer:
        return Transfer(axis, operation, what, count, one.times(count))

    def _pp(self) -> Iterator[Transfer]:
        """Activations forward and their gradients backward over each boundary (Huang et al. 2019, arXiv 1811.06965)."""
        messages = sends(self.schedule, self.at.pp, self.index) if self.at.pp > 1 else 0
        if self.config.inference:
            messages = messages // 2
        one = collectives.send(self.tokens * self.model.hidden * self.size, self._link("pp"))
        yield self._repeated("pp", "send", "activations", self.count * messages, one)

    def _replicas(self) -> Iterator[Transfer]:
        """The shards of the gradients, float32, unit by unit (Zhao et al. 2023, arXiv 2304.11277, section 3.2.2)."""
        if self.config.inference:
            return
        for unit in self._units():
            of_shard = 4 * unit.params / self.at.size(unit.axis)
            one = collectives.all_reduce(of_shard, self.at.dp_replicate, self._link("dp_replicate"))
            yield self._repeated("dp_replicate", "all-reduce", "gradients", unit.count, one)

    def _units(self) -> Iterator[_Unit]:
        # Experts that are split are a unit of their own; those beside several tp ranks at ep=1 are in that of their block.
        share, apart = self.share, self.at.ep > 1
        freed = self.config.fsdp.reshard_after_forward and not (self.at.pp > 1 and splits_backward(self.schedule))
        yield _Unit(share.block + (0 if apart else share.experts), share.blocks, "fsdp", freed)
        yield _Unit(share.ends, 1, "fsdp", False)  # FSDP2 does not free the root after forward
        if apart and share.experts:
            yield _Unit(share.experts, share.blocks, "efsdp", freed)

    def _gathers(self, freed: bool) -> int:
        """How often a unit is gathered in a step.

        For each forward and each backward if it is freed between. In a pipeline torch keeps what a backward has gathered for
        the forward of another micro-batch that follows, and until the gradients are reduced: whatever the order of the ``m``
        micro-batches, that makes ``m + 1``.
        """
        if not self.trained:
            return self.count if freed else 1
        if self.at.pp > 1:
            return self.count + 1 if freed else 1
        return self.calls * (2 if freed else 1)

    def _shards(self) -> Iterator[Transfer]:
        """Parameters gathered in the computing dtype, gradients reduced in float32, once (Zhao et al. 2023, section 3.2.1)."""
        for unit in self._units():
            p, link = self.at.size(unit.axis), self._link(unit.axis)
            one = collectives.all_gather(self.size * unit.params, p, link)
            yield self._repeated(unit.axis, "all-gather", "parameters", unit.count * self._gathers(unit.freed), one)
            if self.trained:
                one = collectives.reduce_scatter(4 * unit.params, p, link)
                yield self._repeated(unit.axis, "reduce-scatter", "gradients", unit.count, one)

    def _kv_heads(self) -> float:
        """Key/value heads of a tp rank; ulysses repeats them until each of its ranks has one."""
        return max(self.model.kv_heads / self.at.tp, self.at.ulysses)

    def _ring(self) -> Iterator[Transfer]:
        """Keys and values go around forward and again backward, then with their gradients in float32 (arXiv 2310.01889)."""
        numbers = 2 * self.tokens * self._kv_heads() * self.model.head_dim
        turns, link = self.at.ring - 1, self._link("ring")
        blocks = collectives.send(numbers * self.size, link)
        yield self._repeated("ring", "send", "keys and values", turns * (self.forwards + self.backwards), blocks)
        yield self._repeated("ring", "send", "their gradients", turns * self.backwards, collectives.send(4 * numbers, link))

    def _ulysses(self) -> Iterator[Transfer]:
        """Queries, keys, values and the result, each by an all-to-all (Jacobs et al. 2023, arXiv 2309.14509, section 3)."""
        queries = self.model.hidden / self.at.tp
        keys = self._kv_heads() * self.model.head_dim
        for what, numbers in (("queries and results", queries), ("keys and values", keys)):
            one = collectives.all_to_all(self.tokens * numbers * self.size, self.at.ulysses, self._link("ulysses"))
            yield self._repeated("ulysses", "all-to-all", what, 2 * (self.forwards + self.backwards), one)

    def _tp(self) -> Iterator[Transfer]:
        """Sums of activations (Shoeybi et al. 2019, arXiv 1909.08053, section 3), the ends of the model, and its whole weights.

        Forward sums once behind attention and once behind the feed-forward part. Backward sums the gradient of an input for
        each matrix that reads it (queries, keys and values; gate and up), where the paper has one matrix and one sum. A part of
        experts sums once each way if they are split over ``tp``, else every rank has all of them.
        """
        if self.at.tp == 1:
            return
        link, whole = self._link("tp"), self.tokens * self.model.hidden * self.size
        total = collectives.all_reduce(whole, self.at.tp, link)
        is_mixture = self.model.experts > 1
        if self.sequence:
            yield from self._slices(whole, zones=1 if is_mixture else 2)
        else:
            shared = 1 if self.at.ep > 1 else 0
            behind = shared if is_mixture else 1
            before = 3 + (shared if is_mixture else 2 if self.model.gated else 1)
            sums = self.forwards + behind * (self.forwards - self.again)
            yield self._repeated("tp", "all-reduce", "activations", sums, total)
            yield self._repeated("tp", "all-reduce", "their gradients", before * self.backwards, total)
        if self.share.first:
            yield self._repeated("tp", "all-reduce", "embeddings", self.count, total)
        if self.share.last:
            logits = collectives.all_gather(self.tokens * self.model.vocab * self.size, self.at.tp, link)
            yield self._repeated("tp", "all-gather", "logits", self.count, logits)
            yield self._repeated("tp", "all-reduce", "gradients of the head's input", self.count * self.trained, total)

    def _slices(self, whole: float, zones: int) -> Iterator[Transfer]:
        """Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).

        Each zone (attention, the feed-forward part) gathers the sequence and scatters the sum, both ways. The blocks of a stage
        are entered and left by one more gather, backward and forward. Gradients of weights that no rank splits, and of experts
        at ``ep=1``, are summed over ``tp``, once a step.
        """
        link, passes = self._link("tp"), zones * (self.forwards + self.backwards)
        around = self.share.stages * self.count * (1 + self.trained)
        gathered = collectives.all_gather(whole, self.at.tp, link)
        yield self._repeated("tp", "all-gather", "activations", passes + around, gathered)
        once = self.again if zones > 1 else 0
        yield self._repeated("tp", "reduce-scatter", "activations", passes - once, gathered)
        if self.trained:
            params = self.model.whole + (self.share.experts if self.at.ep == 1 else 0)
            one = collectives.all_reduce(params * self.size, self.at.tp, link)
            yield self._repeated("tp", "all-reduce", "gradients of whole weights", self.share.blocks, one)

    def _ep(self) -> Iterator[Transfer]:
        """Tokens to their experts and back, two all-to-alls forward and two backward (Lepikhin et al. 2020, arXiv 2006.16668).

        Experts are taken to be equally busy. Before, ranks tell each other how many tokens there are for each expert. Without
        sequence parallelism ``ep == tp`` ranks have the same tokens and sum what their experts make of them, which ``tp``
        counts.
        """
        if self.at.ep == 1 or self.model.experts == 1 or (self.at.tp > 1 and not self.sequence):
            return
        link = self._link("ep")
        numbers = self.tokens / self.at.tp * self.model.top_k * self.model.hidden
        one = collectives.all_to_all(numbers * self.size, self.at.ep, link)
        yield self._repeated("ep", "all-to-all", "tokens", 2 * (self.forwards + self.backwards), one)
        counts = collectives.all_gather(8 * self.model.experts * self.at.ep, self.at.ep, link)
        yield self._repeated("ep", "all-gather", "counts of tokens", self.forwards, counts)
