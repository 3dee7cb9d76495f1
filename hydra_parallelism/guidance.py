"""Classifier-free guidance (Ho & Salimans 2022, https://arxiv.org/abs/2207.12598), its two branches side by side.

The prediction of a guided model is ``uncond + scale * (cond - uncond)``: ``scale`` is ``1 + w`` of the paper, 1 is the
conditional prediction alone. Worked example, ``cfg_parallel=2`` on 4 ranks with ``dp_shard=2``, a batch of B samples per data
rank:

====  ======  ======  ====================  =========================
rank  fsdp    cfg     computes              then has
====  ======  ======  ====================  =========================
0     0       0       B conditional         the combined prediction of
1     0       1       B unconditional       data rank 0's B samples
2     1       0       B conditional         the combined prediction of
3     1       1       B unconditional       data rank 1's B samples
====  ======  ======  ====================  =========================

With ``cfg_parallel=1`` a rank computes both in one call of 2B samples.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _compat
from .errors import ConfigurationError
from .parallelize.steps import as_call
from .runtime import ParallelContext, current

__all__ = ["guided"]

_PLAIN = (bool, int, float, str, type(None))
"""Types of values beside tensors that can be told to be the same in two branches."""

_agreed: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Model -> {kind of call: what it returns}, as far as the two ranks have compared it."""


def guided(model: nn.Module, cond: Any, uncond: Any, scale: float | Tensor, *, context: ParallelContext | None = None) -> Any:
    """The combined prediction of a conditional and an unconditional call, under ``torch.no_grad()``.

    With ``cfg_parallel=2`` the two ranks along ``cfg`` compute one branch each, and one all-gather of the output over ``cfg``
    gives both ranks both branches: they return the same bits. The first call of a kind also compares, in one all-reduce of five
    numbers, what the ranks were given and what came out. The result is that of ``cfg_parallel=1`` bit for bit where the
    device's kernels compute a sample alike in a batch of B and in one of 2B. Torch 2.13 on an x86 CPU does from B = 4 on; for
    fewer samples its matrix products add up in another order.

    Collective: call on all ranks, with the same inputs on the ranks along ``cfg``; draw noise from
    ``seed_for(seed)``, which is the same there.

    Args:
        model: What :func:`hydra_parallelism.parallelize` returned, or any module, in ``eval()`` mode.
        cond: Inputs of the conditional branch: a tensor, or a tuple of positional or a mapping of keyword arguments of the
            model. Dim 0 of every tensor is the batch, B samples; a tensor of no dimension must be the same object in both.
        uncond: Those of the unconditional branch, of the same structure, shapes and dtypes; what is no tensor must be equal.
        scale: Guidance scale, or a tensor of them that broadcasts against the output.
        context: Whose ``cfg`` axis to use; the :func:`~hydra_parallelism.current` one by default.

    Returns:
        What the model returns for B samples, a tensor or containers of them. Floating-point tensors are combined, everything
        else is that of the conditional branch.

    Raises:
        ConfigurationError: The inputs of the branches do not match, the model is in training mode, or its output cannot be
            taken apart or differs in kind between the branches.
    """
    context = context or current()
    branches = _pair(cond, uncond)
    if model.training:
        raise ConfigurationError(
            f"guided(model, ...): {type(model).__name__} is in training mode, in which dropout and batch statistics would "
            "make the prediction depend on the layout\n  try: model.eval()"
        )
    with torch.no_grad():
        both = _in_turn(model, branches) if context.topology.cfg == 1 else _side_by_side(model, branches, scale, context)
        return both.combine(scale)


@dataclass(frozen=True)
class _Branches:
    """The arguments of the two calls, taken apart alike."""

    cond: list[Any]
    uncond: list[Any]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    batch: int
    kind: str
    """Structure, shapes and dtypes of the tensors, and all other values."""

    def call(self, model: nn.Module, leaves: list[Any]) -> tuple[list[Any], Any]:
        """The output of a call, taken apart."""
        args, kwargs = self.rebuild(leaves)
        outputs, spec = _compat.flatten(model(*args, **kwargs))
        return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in outputs], spec


@dataclass(frozen=True)
class _Outputs:
    """What the two branches return, taken apart alike."""

    cond: list[Any]
    uncond: list[Any]
    spec: Any

    def combine(self, scale: float | Tensor) -> Any:
        pairs = zip(self.cond, self.uncond, strict=True)
        return _compat.unflatten([u + scale * (c - u) if _is_guided(c) else c for c, u in pairs], self.spec)


def _is_guided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _in_turn(model: nn.Module, branches: _Branches) -> _Outputs:
    """Both branches in one call, the conditional one first."""
    pairs = zip(branches.cond, branches.uncond, strict=True)
    joined = [torch.cat([c, u]) if isinstance(c, Tensor) and c.ndim else c for c, u in pairs]
    leaves, spec = branches.call(model, joined)
    _judge_output(leaves, 2 * branches.batch)
    halves = [leaf.chunk(2) if isinstance(leaf, Tensor) else (leaf, leaf) for leaf in leaves]
    return _Outputs([c for c, _ in halves], [u for _, u in halves], spec)


def _side_by_side(model: nn.Module, branches: _Branches, scale: float | Tensor, context: ParallelContext) -> _Outputs:
    """One branch here, the other on the other rank along ``cfg``."""
    group, mine = context.mesh["cfg"].get_group(), (branches.cond, branches.uncond)[context.coordinate["cfg"]]
    known = _agreed.setdefault(model, {})
    if branches.kind in known:
        leaves, spec = branches.call(model, mine)
        found = _describe(leaves, spec)
        if found != known[branches.kind]:
            raise ConfigurationError(
                f"guided(model, ...): for inputs of the same shapes {type(model).__name__} returned {found} now and "
                f"{known[branches.kind]} before, so the ranks along cfg cannot know what the other one sends\n"
                f"  try: {context.key}.cfg_parallel=1"
            )
        return _exchange(leaves, spec, group)
    leaves, spec, error = [], None, None
    try:
        leaves, spec = branches.call(model, mine)
        _judge_output(leaves, branches.batch)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other rank must not wait for this one
        error = caught
    found = _describe(leaves, spec)
    _agree(found, branches, scale, error, context)
    known[branches.kind] = found
    return _exchange(leaves, spec, group)


def _exchange(leaves: list[Any], spec: Any, group: dist.ProcessGroup) -> _Outputs:
    """Have both ranks' tensors on both, in one all-gather of their bytes."""
    sent = torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves if isinstance(leaf, Tensor)])
    received = sent.new_empty(2 * sent.numel())
    dist.all_gather_single(received, sent, group=group)
    cond, uncond = (_unpack(half, leaves) for half in received.chunk(2))
    return _Outputs(cond, uncond, spec)


def _unpack(received: Tensor, leaves: list[Any]) -> list[Any]:
    """A branch's tensors out of their bytes, given this rank's, which have the same shapes."""
    found, begin = [], 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            # A copy, because a view as another dtype must begin at a multiple of its size.
            piece = received.narrow(0, begin, leaf.nbytes).clone()
            found.append(piece.view(leaf.dtype).view(leaf.shape))
            begin += leaf.nbytes
        else:
            found.append(leaf)
    return found


def _agree(found: str, branches: _Branches, scale: float | Tensor, error: Exception | None, context: ParallelContext) -> None:
    """Go on together, or refuse together: one all-reduce for each new kind of call."""
    given, came = _digest([branches.kind, scale, *branches.cond, *branches.uncond]), _digest([found])
    seen = torch.tensor([given, -given, came, -came, error is not None], dtype=torch.int64, device=context.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=context.mesh["cfg"].get_group())
    highest_given, lowest_given, highest, lowest, failed = seen.tolist()
    if error is not None:
        raise error
    key = f"{context.key}.cfg_parallel=2"
    if highest_given != -lowest_given:
        raise ConfigurationError(
            f"{key}: the two ranks along cfg called guided() with different inputs or scales, and would combine predictions of "
            "different samples\n  try: noise from a generator seeded by hydra_parallelism.seed_for(seed), and batches read by "
            "context.dp_rank"
        )
    if failed:
        raise ConfigurationError(f"{key}: the other branch of guided() failed, see the message of the other rank along cfg")
    if highest != -lowest:
        raise ConfigurationError(
            f"{key}: the model returns something else in each branch, {found} in the "
            f"{'un' if context.coordinate['cfg'] else ''}conditional one of this rank, and only like can be combined\n"
            "  try: a model whose output has the same structure, the same shapes and no other values for both"
        )


def _pair(cond: Any, uncond: Any) -> _Branches:
    """Judge the inputs of the branches against each other. Pure."""
    named, other = _arguments(cond), _arguments(uncond)
    if list(named) != list(other):
        raise ConfigurationError(
            f"guided(model, cond, uncond): cond has {', '.join(named) or 'nothing'}, and uncond has "
            f"{', '.join(other) or 'nothing'}\n"
            "  try: the same arguments in both, in uncond a null class or the embedding of an empty prompt"
        )
    leaves: list[tuple[str, Any, Any]] = []
    specs: list[tuple[int, Any]] = []
    for name, value in named.items():
        (ours, spec), (theirs, other_spec) = _compat.flatten(value), _compat.flatten(other[name])
        if spec != other_spec:
            raise ConfigurationError(
                f"guided(model, cond, uncond): {name} holds containers of another structure in cond than in uncond, "
                f"{spec} and {other_spec}\n  try: the same structure in both"
            )
        leaves += [(name, c, u) for c, u in zip(ours, theirs, strict=True)]
        specs.append((len(ours), spec))
    for name, c, u in leaves:
        _judge_leaves(name, c, u)
    batch = _batch(leaves)

    def rebuild(values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(values)
        built = [_compat.unflatten([next(rest) for _ in range(count)], spec) for count, spec in specs]
        args, kwargs = as_call(cond)
        return tuple(built[: len(args)]), dict(zip(sorted(kwargs), built[len(args) :], strict=True))

    kind = f"{list(named)} {[str(spec) for _, spec in specs]} {[_show(c) for _, c, _ in leaves]}"
    return _Branches([c for _, c, _ in leaves], [u for _, _, u in leaves], rebuild, batch, kind)


def _arguments(inputs: Any) -> dict[str, Any]:
    args, kwargs = as_call(inputs)
    return {f"argument {i}": value for i, value in enumerate(args)} | {name: kwargs[name] for name in sorted(kwargs)}


def _judge_leaves(name: str, cond: Any, uncond: Any) -> None:
    if isinstance(cond, Tensor) and isinstance(uncond, Tensor):
        alike, remedy = (
            _show(cond) == _show(uncond),
            "one shape and dtype in both, a null class or an empty prompt padded alike",
        )
        if alike and not cond.ndim and cond is not uncond:
            alike, remedy = False, "a tensor with a value for each sample, value.expand(batch), or the same tensor in both"
    else:
        alike = cond is uncond or (type(cond) is type(uncond) and isinstance(cond, _PLAIN) and cond == uncond)
        remedy = "a tensor in both, dim 0 the batch"
    if not alike:
        raise ConfigurationError(
            f"guided(model, cond, uncond): {name} is {_show(cond)} in cond and {_show(uncond)} in uncond, so that the two "
            f"cannot be one batch\n  try: {remedy}"
        )


def _batch(leaves: list[tuple[str, Any, Any]]) -> int:
    rows = [(name, len(c)) for name, c, _ in leaves if isinstance(c, Tensor) and c.ndim]
    if len({count for _, count in rows}) != 1:
        seen = ", ".join(f"{name} has {count}" for name, count in rows) or "there is none"
        raise ConfigurationError(
            f"guided(model, cond, uncond): dim 0 of every tensor must be the batch, but {seen}\n"
            "  try: tables that are no samples in the model, values for all samples expanded"
        )
    return rows[0][1]


def _judge_output(leaves: list[Any], rows: int) -> None:
    """What cannot be taken apart into the branches' shares is refused, whatever the layout."""
    for leaf in leaves:
        fits = (leaf.ndim and len(leaf) == rows) if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN)
        if not fits:
            raise ConfigurationError(
                f"guided(model, ...): the output of the model for {rows} samples holds {_show(leaf)}, which cannot be divided "
                f"into those of the branches\n"
                "  try: an output of tensors whose dim 0 is the batch (Transformers: use_cache=False)"
            )
    if not any(_is_guided(leaf) for leaf in leaves):
        raise ConfigurationError(
            "guided(model, ...): the output of the model holds no floating-point tensor, so there is nothing to combine\n"
            "  try: a model that returns its prediction"
        )


def _describe(leaves: list[Any], spec: Any) -> str:
    return f"{', '.join(map(_show, leaves))} in {spec}" if len(leaves) != 1 else _show(leaves[0])


def _show(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"something of type {type(leaf).__name__}"


def _digest(values: list[Any]) -> int:
    """Of all bits, as a number that fits an int64 and its negative."""
    digest = hashlib.blake2b(digest_size=7)
    for value in values:
        is_tensor = isinstance(value, Tensor)
        digest.update(
            value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if is_tensor else _show(value).encode()
        )
    return int.from_bytes(digest.digest(), "big")
