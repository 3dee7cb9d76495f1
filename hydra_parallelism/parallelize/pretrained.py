"""Models of Transformers under context parallelism: our attention in their registry, and the positions of each rank's piece.

They choose their attention by name (``config._attn_implementation``) from a registry that is open to others. With a name of
ours they make no mask of their own, so all that a mask would say is judged here: padding, packed sequences and windows are
refused. Positions, which they count from 0 when none are given, are those of the rank's piece.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..context_parallel.attention import attention, layout_of
from ..context_parallel.shards import cut
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from .trial import as_dealt

__all__ = ["NAME", "attach", "find"]

NAME = "hydra_parallelism"
"""What the registry of Transformers calls our attention."""

_ATTENDS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that mix positions in the attention function alone."""

_BEYOND = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "block_mask")
"""What some models pass to their attention function and ours does not do."""


def find(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of Transformers in a module. Whoever has not imported Transformers has none."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside: set[nn.Module] = set()
    for model in module.modules():
        if isinstance(model, library.PreTrainedModel) and model not in inside:
            inside |= set(model.modules())
            yield model


def attach(model: Any, context: ParallelContext, key: str) -> None:
    """Have a model attend through us and know the positions of its rank's piece, in place.

    Raises:
        ConfigurationError: The model attends in its own way, whatever the registry says, or cannot be told its positions.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigurationError(
            f"{key}.context_parallel: {type(model).__name__} takes no position_ids, so all pieces of a sequence would begin "
            f"at position 0\n  try: {_off(key)}"
        )
    if any(_counts_from_padding(inner) for inner in model.modules()):
        raise ConfigurationError(
            f"{key}.context_parallel: {type(model).__name__} counts positions from its padding token on\n  try: {_off(key)}"
        )
    others = sorted(set(getattr(model.config, "layer_types", None) or ()) - _ATTENDS)
    if others:
        raise ConfigurationError(
            f"{key}.context_parallel: {type(model).__name__} has layers of type {', '.join(others)}, which would see a piece "
            f"for the whole\n  try: {_off(key)}"
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(_attend, context, key))
    _own_config(model)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ConfigurationError(
            f"{key}.context_parallel: {type(model).__name__} does not take its attention from the registry of Transformers\n"
            f"  try: {_off(key)}"
        )
    model.forward = partial(_run, model.forward, inspect.signature(model.forward), context, key)
    model.generate = partial(_refuse_generation, key)


def _off(key: str) -> str:
    """What takes context parallelism away."""
    return f"{key}.context_parallel.ring_degree=1 {key}.context_parallel.ulysses_degree=1"


def _counts_from_padding(module: nn.Module) -> bool:
    """As RoBERTa and its kin do."""
    table = getattr(module, "position_embeddings", None)
    return isinstance(table, nn.Embedding) and table.padding_idx is not None


def _own_config(model: nn.Module) -> None:
    """Give a model a config of its own, which another model may share: it says how to attend."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config, memo)


def _refuse_generation(key: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigurationError(
        f"{key}.context_parallel: generate() would let each rank go on writing at the end of its own piece\n"
        f"  try: {_off(key)} to generate"
    )


def _attend(
    context: ParallelContext,
    key_of_config: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it: (batch, heads, positions, width) in, (batch, positions, heads, width) out."""
    beyond = [name for name in _BEYOND if others.get(name) is not None]
    if sliding_window is not None and sliding_window < query.shape[2] * context.topology.cp:
        beyond.append(f"sliding_window={sliding_window}")
    if beyond:
        raise ConfigurationError(
            f"{key_of_config}.context_parallel: {type(module).__name__} asks for {', '.join(beyond)}, which attention over "
            f"pieces of a sequence does not do\n"
            f"  try: {_off(key_of_config)}"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = attention(
        query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=key.shape[1] != query.shape[1], context=context
    )
    return output.transpose(1, 2).contiguous(), None


def _run(
    forward: Callable[..., Any], signature: inspect.Signature, context: ParallelContext, key: str, *args: Any, **kwargs: Any
) -> Any:
    """The model's forward on a piece: with its positions, without a mask that says nothing, without what would be wrong."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if isinstance(given.get(name), Tensor)), None)
    if tokens is None:
        return forward(*args, **kwargs)
    _refuse_labels(given, key)
    if given.get("output_attentions"):
        raise ConfigurationError(f"{key}.context_parallel: no rank has whole rows of attention\n  try: output_attentions=False")
    if given.get("attention_mask") is not None:
        _refuse_padding(given.pop("attention_mask"), key)
    given["position_ids"] = _positions(tokens, given.get("position_ids"), context, key)
    return forward(**given)


def _positions(tokens: Tensor, given: Any, context: ParallelContext, key: str) -> Tensor:
    layout, rank = layout_of(context), context.topology.index("cp", context.rank)
    whole = torch.arange(tokens.shape[1] * layout.cp, device=tokens.device)[None]
    mine = as_dealt(cut(whole, layout, rank, 1) if layout.fits(whole.shape[1]) else whole[:, : tokens.shape[1]])
    if given is not None and not (given.shape[-1] == mine.shape[-1] and bool((given == mine).all())):
        raise ConfigurationError(
            f"{key}.context_parallel: position_ids are not those of this rank's piece of one whole sequence; packed sequences "
            f"attend across each other's borders here\n"
            f"  try: no position_ids, they are put in; or hydra_parallelism.shard_sequence(torch.arange(length), dim=0)"
        )
    return mine


def _refuse_padding(mask: Any, key: str) -> None:
    if not (isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())):
        raise ConfigurationError(
            f"{key}.context_parallel: attention_mask hides positions, and attention over pieces of a sequence takes no mask\n"
            f"  try: sequences without padding, or {_off(key)}"
        )


def _refuse_labels(kwargs: Mapping[str, Any], key: str) -> None:
    if kwargs.get("labels") is not None:
        raise ConfigurationError(
            f"{key}.context_parallel: labels are shifted by one inside the model, and the piece's last token does not know the "
            f"next piece's first\n"
            f"  try: targets = tokens[:, 1:], cut by hydra_parallelism.shard_sequence with the inputs, and a loss outside"
        )
