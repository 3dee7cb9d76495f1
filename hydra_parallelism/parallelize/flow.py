"""What flows between stages: found, and refused where a pipeline could not carry it, by running the forward on stand-ins alone.

Between two stages travels what the first module of the later one is called with and the earlier one computed: the hidden
state, or several tensors where blocks pass on several. Anything else that a stage reads from another would be zeros there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import _compat
from ..errors import ConfigurationError
from .stand_ins import StandIn, sources, trace

__all__ = ["Flow"]


class Flow:
    """The flow through a model that is cut into stages."""

    def __init__(
        self,
        skeleton: nn.Module,
        stand_ins: Mapping[str, StandIn],
        bare: Sequence[str],
        division: Sequence[Sequence[str]],
        key: str,
    ) -> None:
        self.skeleton, self._stand_ins, self._bare, self._key = skeleton, stand_ins, bare, key
        self._division = division
        self._stage_of = {name: stage for stage, names in enumerate(division) for name in names}
        self.first = tuple(next(name for name in names if name not in bare) for names in division)
        """The module at which each stage begins."""
        self._slots: dict[int, tuple[int, ...]] = {}
        self.passed: dict[int, tuple[torch.Tensor, ...]] = {}
        """Stage -> likenesses, on ``meta``, of what it is sent, as the last :meth:`trace` saw it."""
        self._seen: set[str] = set()

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> dict[int, tuple[int, ...]]:
        """Run the model on stand-ins and see what each stage reads. The same on every rank, no communication.

        Args:
            args: Positional arguments of one micro-batch.
            kwargs: Its keyword arguments.
            training: Whether the model is in training mode.

        Returns:
            Stage -> which of the flat arguments of its first module come from the stage before.

        Raises:
            ConfigurationError: A stage reads what only a stage before the previous one, or a later one, has.
        """
        self._slots, self._seen = {}, set()
        devices = [device for device in {s.device for s in self._stand_ins.values()} if device.type != "cpu"]
        self._mark(True)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                output = self.skeleton.train(training)(*args, **kwargs)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the forward of {type(self.skeleton).__name__} cannot be run in stages: {error}\n"
                f"  it runs on every stage, with stand-ins for what other stages hold\n"
                f"  try: a forward that passes tensors from module to module, or {self._key}.pp_size=1"
            ) from error
        finally:
            self._mark(False)
        last = len(self._division) - 1
        self._refuse_strangers("the output of the model", last, sources(_compat.flatten(output)[0]))
        for stage in range(1, last + 1):
            if stage not in self._slots:
                raise ConfigurationError(
                    f"{self._key}.pipeline.split: {self.first[stage]}, with which stage {stage} begins, is not called\n"
                    f"  try: begin the stage with a module that the forward of the model calls"
                )
        return dict(self._slots)

    def _mark(self, on: bool) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.visit = self._visit if on else None
        for name in self._bare:
            owner, _, last = name.rpartition(".")
            holder = self.skeleton.get_submodule(owner)
            value = getattr(holder, last)
            setattr(holder, last, trace(value, name) if on else value.as_subclass(torch.Tensor))

    def _visit(self, name: str, leaves: list[Any]) -> None:
        stage = self._stage_of[name]
        if name in self._seen:
            raise ConfigurationError(
                f"{name} runs more than once in one forward, which a pipeline cannot do: its stage runs once\n"
                f"  try: {self._key}.pp_size=1"
            )
        self._seen.add(name)
        if name != self.first[stage] or stage == 0:
            self._refuse_strangers(name, stage, sources(leaves))
            return
        self._slots[stage] = tuple(at for at, leaf in enumerate(leaves) if sources([leaf]))
        self.passed[stage] = tuple(torch.empty_like(leaves[at], device="meta") for at in self._slots[stage])
        self._refuse_strangers(name, stage - 1, sources(leaves), reader=stage)
        if not self._slots[stage]:
            raise ConfigurationError(
                f"{self._key}.pipeline.split: {name}, with which stage {stage} begins, reads nothing from stage {stage - 1}\n"
                f"  try: {self._key}.pipeline.split=auto, or modules in the order in which they run"
            )

    def _refuse_strangers(self, what: str, stage: int, origins: frozenset[str], reader: int | None = None) -> None:
        """Everything must come from one stage."""
        strangers = sorted(origins - set(self._division[stage]), key=lambda name: (self._stage_of[name], name))
        if not strangers:
            return
        where = f"{what} (stage {stage if reader is None else reader})" if what in self._stage_of else what
        sources_ = ", ".join(f"{name} (stage {self._stage_of[name]})" for name in strangers[:4])
        raise ConfigurationError(
            f"{where} reads what {sources_} computes, and a pipeline hands on only what the first module of the next stage is "
            f"called with ({', '.join(f'stage {n}: {name}' for n, name in enumerate(self.first) if n)})\n"
            f"  try: {self._key}.pipeline.split with both in one stage, in the order they run in, or {self._key}.pp_size=1"
        )
