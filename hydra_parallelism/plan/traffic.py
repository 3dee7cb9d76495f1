"""Bytes that a rank sends in one step, axis by axis, and how long that takes if nothing overlaps. Pure.

A step is one micro-batch, or all micro-batches of a pipeline. Counted are the parameters and gradients of FSDP and what blocks
exchange; not the embedding and the head over ``tp``, the loss, and clipping.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from . import collectives
from .case import Case
from .collectives import Cost
from .machine import Link
from .memory import Share, compute_bytes, share_of
from .model import Model
from .schedules import microbatches_of, sends

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
    """Whether it is gathered anew for each use."""


def traffic(case: Case, model: Model, rank: int) -> list[Transfer]:
    """What a rank sends in a step of training (of a forward pass under ``inference``), axes outermost first."""
    return list(_Step(case, model, rank).transfers())


class _Step:
    """The numbers that the axes share."""

    def __init__(self, case: Case, model: Model, rank: int) -> None:
        self.case, self.model, self.rank = case, model, rank
        self.at, self.config = case.topology, case.config
        self.share: Share = share_of(model, self.at)
        self.schedule = self.config.pipeline.schedule.name
        self.count = microbatches_of(self.config.pipeline, self.at.pp)
        self.size = compute_bytes(self.config)
        self.tokens = model.tokens / self.at.cp
        self.passes = 1 if self.config.inference else 2
        """Forward, and backward with as much."""

    def transfers(self) -> Iterator[Transfer]:
        for of_axis in (self._pp, self._replicas, self._shards, self._ring, self._ulysses, self._tp, self._ep):
            yield from (each for each in of_axis() if each.cost.wire_bytes)

    def _link(self, axis: str) -> Link:
        return self.case.machine.link(self.at.group(axis, self.rank))

    def _repeated(self, axis: str, operation: str, what: str, count: float, one: Cost) -> Transfer:
        return Transfer(axis, operation, what, count, one.times(count))

    def _pp(self) -> Iterator[Transfer]:
        """Activations forward and their gradients backward over each boundary (Huang et al. 2019, arXiv 1811.06965)."""
        messages = sends(self.schedule, self.at.pp, self.at.index("pp", self.rank)) if self.at.pp > 1 else 0
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
        share, apart = self.share, self.at.ep > 1
        yield _Unit(share.block + (0 if apart else share.experts), share.blocks, "fsdp", self.config.fsdp.reshard_after_forward)
        yield _Unit(share.ends, 1, "fsdp", False)  # FSDP2 does not free the root after forward
        if apart and share.experts:
            yield _Unit(share.experts, share.blocks, "efsdp", self.config.fsdp.reshard_after_forward)

    def _shards(self) -> Iterator[Transfer]:
        """Parameters gathered in the computing dtype, gradients reduced in float32 (Zhao et al. 2023, section 3.2.1).

        Units that are freed after forward are gathered again for backward; in a pipeline, for each micro-batch.
        """
        for unit in self._units():
            p, link = self.at.size(unit.axis), self._link(unit.axis)
            gathers = unit.count * (self.passes * self.count if unit.freed else 1)
            one = collectives.all_gather(self.size * unit.params, p, link)
            yield self._repeated(unit.axis, "all-gather", "parameters", gathers, one)
            if not self.config.inference:
                one = collectives.reduce_scatter(4 * unit.params, p, link)
                yield self._repeated(unit.axis, "reduce-scatter", "gradients", unit.count, one)

    def _kv_heads(self) -> float:
        """Key/value heads of a tp rank; ulysses repeats them until each of its ranks has one."""
        return max(self.model.kv_heads / self.at.tp, self.at.ulysses)

    def _ring(self) -> Iterator[Transfer]:
        """Keys and values go around forward and again backward, then with their gradients in float32 (arXiv 2310.01889)."""
        numbers = 2 * self.tokens * self._kv_heads() * self.model.head_dim
        turns = self.share.blocks * self.count * (self.at.ring - 1)
        link = self._link("ring")
        yield self._repeated(
            "ring", "send", "keys and values", turns * self.passes, collectives.send(numbers * self.size, link)
        )
        if not self.config.inference:
            yield self._repeated("ring", "send", "their gradients", turns, collectives.send(4 * numbers, link))

    def _ulysses(self) -> Iterator[Transfer]:
        """Queries, keys, values and the result, each by an all-to-all (Jacobs et al. 2023, arXiv 2309.14509, section 3)."""
        queries = self.model.hidden / self.at.tp
        keys = self._kv_heads() * self.model.head_dim
        for what, numbers in (("queries and results", queries), ("keys and values", keys)):
            one = collectives.all_to_all(self.tokens * numbers * self.size, self.at.ulysses, self._link("ulysses"))
            yield self._repeated("ulysses", "all-to-all", what, 2 * self.passes * self.share.blocks * self.count, one)

    def _tp(self) -> Iterator[Transfer]:
        """Two all-reduces of activations in a block forward, two backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

        Under sequence parallelism each is an all-gather and a reduce-scatter of as many bytes (arXiv 2205.05198, section
        4.2.2).
        Where tokens go to experts on other ranks, the feed-forward part has none.
        """
        halves = 1 if self.at.ep > 1 and self.config.enable_sequence_parallel else 2
        one = collectives.all_reduce(self.tokens * self.model.hidden * self.size, self.at.tp, self._link("tp"))
        operation = "all-gather, reduce-scatter" if self.config.enable_sequence_parallel else "all-reduce"
        yield self._repeated("tp", operation, "activations", halves * self.passes * self.share.blocks * self.count, one)

    def _ep(self) -> Iterator[Transfer]:
        """Tokens to their experts and back, two all-to-alls forward and two backward (Lepikhin et al. 2020, arXiv 2006.16668).

        Experts are taken to be equally busy. Without sequence parallelism ``ep == tp`` ranks have the same tokens and sum what
        their experts make of them, which ``tp`` counts.
        """
        if self.at.ep == 1 or self.model.experts == 1 or (self.at.tp > 1 and not self.config.enable_sequence_parallel):
            return
        numbers = self.tokens / self.at.tp * self.model.top_k * self.model.hidden
        one = collectives.all_to_all(numbers * self.size, self.at.ep, self._link("ep"))
        yield self._repeated("ep", "all-to-all", "tokens", 2 * self.passes * self.share.blocks * self.count, one)
