"""Forward alone through the stages: for evaluation, under any schedule.

Torch's V-shaped schedules cannot run without a backward, and the others hold buffers for one. Each rank takes its stages in
order and all micro-batches through each. What a stage computes is sent at once where messages between two ranks go one way
only, and after its last micro-batch where they go both ways, so that both ranks post them in one order.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigurationError
from .part import Call, Part

__all__ = ["Relay"]


class Relay:
    """Runs the stages of a rank forward."""

    def __init__(
        self, parts: tuple[Part, ...], rank_of: Callable[[int], int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._parts, self._group, self._device = parts, group, device
        self._rank_of, self._rank = rank_of, dist.get_rank(group)

    def run(self, call: Call, count: int) -> Any:
        """The output for a whole batch where this rank holds the last stage, ``None`` elsewhere. Collective over ``pp``."""
        pieces = [{name: tensor.chunk(count)[n] for name, tensor in call.whole.items()} for n in range(count)]
        passed: list[tuple[Tensor, ...]] = []
        works: list[dist.Work] = []
        for part in self._parts:
            before, after = part.index - 1, part.index + 1
            is_local = bool(part.index) and self._rank_of(before) == self._rank
            received = passed if is_local else self._receive(before, count) if part.index else [()] * count
            sent: list[tuple[Tensor, ...]] = []
            for n, inputs in enumerate(received):
                sent.append(part.module(*inputs, **pieces[n]))
                if part.exit is not None and len(self._parts) == 1:
                    works += self._send(sent[-1], after, is_first=n == 0)
            if part.exit is not None and len(self._parts) > 1 and self._rank_of(after) != self._rank:
                for n, tensors in enumerate(sent):
                    works += self._send(tensors, after, is_first=n == 0)
            passed = sent
        for work in works:
            work.wait()
        return self._join(passed) if self._parts[-1].exit is None else None

    def _send(self, tensors: tuple[Tensor, ...], stage: int, *, is_first: bool) -> list[dist.Work]:
        peer = self._rank_of(stage)
        if is_first:
            shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            dist.send_object_list([shapes], group=self._group, group_dst=peer, device=self._device)
        works = [dist.isend(tensor, group=self._group, group_dst=peer) for tensor in tensors]
        return [work for work in works if work is not None]

    def _receive(self, stage: int, count: int) -> Any:
        """What the stage before sends, one micro-batch after another."""
        peer, header = self._rank_of(stage), [None]
        dist.recv_object_list(header, group=self._group, group_src=peer, device=self._device)
        shapes: Any = header[0]
        for _ in range(count):
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes)
            for tensor in tensors:
                dist.recv(tensor, group=self._group, group_src=peer)
            yield tensors

    def _join(self, outputs: list[tuple[Tensor, ...]]) -> Any:
        """One output for the batch: tensors put together along dim 0, everything else from the last micro-batch.

        What cannot be put together comes out as the error to be raised, for the other ranks wait for this one.
        """
        if any(tensor.ndim == 0 for tensor in outputs[0]):
            return ConfigurationError(
                "the output of the model holds a tensor of no dimension (a loss?), and each of the "
                f"{len(outputs)} micro-batches makes one of its own\n"
                "  try: an output whose tensors have the batch in dim 0 (Transformers: no labels)"
            )
        return self._parts[-1].rebuild_output(tuple(torch.cat(tensors) for tensors in zip(*outputs, strict=True)))
