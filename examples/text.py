"""Batches of text, the same global batch whatever the layout of the ranks.

A token is a byte. Step ``s`` draws the windows of the *whole* batch from a generator seeded by ``(seed, s)``, on every rank
alike, and each rank keeps its own share. Worked example, a global batch of 8 windows ``w0 .. w7``:

=============  =========  =========  =========  =========
dp_world_size  dp_rank 0  dp_rank 1  dp_rank 2  dp_rank 3
=============  =========  =========  =========  =========
1              w0 .. w7
2              w0 .. w3   w4 .. w7
4              w0 w1      w2 w3      w4 w5      w6 w7
=============  =========  =========  =========  =========
"""

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["VOCAB", "batch", "load"]

VOCAB = 256
"""Tokens are bytes."""

# torch's CPU generator reads the low 32 bits of a seed only: an odd stride keeps seeds apart there (a shift by 32 would not),
# and a large one keeps the run with seed 1 from drawing the batches of seed 0 one step later.
_SEED_STRIDE = 1_000_003


def load(path: str | None, seq_len: int) -> Tensor:
    """Read a text as one long tensor of bytes.

    Args:
        path: A text file, or ``None`` for the help topics that every CPython ships (about 465 kB of English and Python).
        seq_len: Length of the windows that will be drawn from it.

    Raises:
        ValueError: The text is shorter than one window.
    """
    content = _python_topics() if path is None else Path(path).read_bytes()
    if len(content) <= seq_len:
        raise ValueError(
            f"{path or 'the text'} has {len(content)} byte(s), but one window needs model.seq_len + 1 = {seq_len + 1}\n"
            "  try: a longer text, or a smaller model.seq_len"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batch(text: Tensor, *, seed: int, step: int, local_batch: int, seq_len: int, dp_rank: int, dp_world_size: int) -> Tensor:
    """Draw the global batch of a step and keep one rank's share.

    Args:
        text: What :func:`load` returned.
        seed: Of the run.
        step: Global step, from 0. Any step can be asked for, in any order, so a resumed run sees the batches it missed.
        local_batch: Windows per rank; the global batch has ``local_batch * dp_world_size``.
        seq_len: Tokens per window that the model reads.
        dp_rank: Which share.
        dp_world_size: Number of shares.

    Returns:
        Token numbers of shape ``(local_batch, seq_len + 1)``: the last token of a window is only ever a target.
    """
    generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + step)
    offsets = torch.randint(len(text) - seq_len, (local_batch * dp_world_size,), generator=generator)
    mine = offsets[dp_rank * local_batch : (dp_rank + 1) * local_batch]
    return text.unfold(0, seq_len + 1, 1)[mine].long()


def _python_topics() -> bytes:
    from pydoc_data.topics import topics  # here, because it is half a megabyte that a run on one's own text does not need

    return "\n".join(topics[name] for name in sorted(topics)).encode()
