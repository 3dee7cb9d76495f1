"""Activation checkpointing: keep a block's input, compute the rest again in backward.

``parallelism.activation_checkpointing`` is ``none``, ``full`` (every block) or a number n (every n-th block, beginning with the
first). The block's ``forward`` is replaced by one that runs it under ``torch.utils.checkpoint``; the tree of modules stays as
it is, so parameter names in state dicts do too, which a wrapper module would change. FSDP's and tensor parallelism's hooks sit
around ``forward``: what they gather for the block is there when it is computed again.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .recipe import Recipe

__all__ = ["choose_blocks", "wrap"]


def choose_blocks(model: nn.Module, config: ParallelismConfig, block_names: tuple[str, ...], key: str) -> tuple[str, ...]:
    """Names of the blocks to be computed again. Pure.

    Raises:
        ConfigurationError: The model has no block list, or no block is an n-th one.
    """
    policy = config.activation_checkpointing
    if policy == "none":
        return ()
    if not block_names:
        raise ConfigurationError(
            f"{key}.activation_checkpointing={policy}, but {type(model).__name__} has no list of repeated blocks\n"
            f"  try: {key}.activation_checkpointing=none"
        )
    if policy != "full" and int(policy) > len(block_names):
        raise ConfigurationError(
            f"{key}.activation_checkpointing={policy}, but {type(model).__name__} has {len(block_names)} blocks, and no "
            f"{policy}th one\n  try: {key}.activation_checkpointing={len(block_names)}, or full"
        )
    return block_names[:: 1 if policy == "full" else int(policy)]


def wrap(module: nn.Module, recipe: Recipe) -> None:
    """Checkpoint the chosen blocks of a model or stage, in place."""
    for _, block in recipe.present(recipe.recomputed, module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
