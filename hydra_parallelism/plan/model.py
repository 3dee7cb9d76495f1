"""A model as numbers: the ``model`` node of a plan, and how many parameters such a model has.

The shape is that of a decoder as Llama (Touvron et al. 2023, arXiv 2302.13971) and Mixtral (Jiang et al. 2024, arXiv
2401.04088) have it: no biases, two norms to a block and one after the last, grouped-query attention.
"""

from dataclasses import dataclass
from typing import Optional

from ..errors import ConfigurationError

__all__ = ["Model", "ModelConfig", "read_model"]


@dataclass
class ModelConfig:
    """The ``model`` node of a plan: ``params`` alone, or the shape. Nothing at all prices nothing."""

    params: Optional[int] = None  # noqa: UP045  (OmegaConf reads it)
    """Parameters of a model whose shape is not said; then only what depends on their number is priced."""
    hidden: Optional[int] = None  # noqa: UP045
    """Width of the residual stream."""
    layers: Optional[int] = None  # noqa: UP045
    """Blocks."""
    heads: Optional[int] = None  # noqa: UP045
    """Query heads; ``hidden / heads`` is the size of one."""
    kv_heads: Optional[int] = None  # noqa: UP045
    """Key/value heads; ``null`` is ``heads``."""
    ffn: Optional[int] = None  # noqa: UP045
    """Width inside the feed-forward part, of one expert if there are several."""
    gated: bool = True
    """Whether that part has three matrices (SwiGLU) instead of two."""
    vocab: Optional[int] = None  # noqa: UP045
    """Entries of the embedding and of the head."""
    tied: bool = False
    """Whether the head is the embedding."""
    positions: bool = False
    """Whether there is a learned table of positions, ``sequence * hidden``, as GPT-2 has it."""
    experts: int = 1
    """Experts of a block. More than one come with a router."""
    top_k: int = 2
    """Experts that a token goes to, if there are several."""
    sequence: Optional[int] = None  # noqa: UP045
    """Tokens of a sequence, before context parallelism cuts it."""
    micro_batch: int = 1
    """Sequences that a data-parallel rank computes on at a time."""
    batch: Optional[int] = None  # noqa: UP045
    """Sequences of a step of the optimizer over all data-parallel ranks. ``null``: one call of ``forward_backward`` is a step,
    of one micro-batch, or of all that a pipeline takes."""


_SHAPE = ("hidden", "layers", "heads", "ffn", "vocab", "sequence")


@dataclass(frozen=True)
class Model:
    """A model's numbers, judged."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    positions: bool
    experts: int
    top_k: int
    sequence: int
    micro_batch: int
    batch: int | None

    @property
    def head_dim(self) -> int:
        """hidden / heads."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Of a micro-batch: micro_batch * sequence."""
        return self.micro_batch * self.sequence

    @property
    def attention(self) -> int:
        """Parameters: two matrices of hidden * hidden, two of hidden * kv_heads * head_dim."""
        return 2 * self.hidden * (self.hidden + self.kv_heads * self.head_dim)

    @property
    def feed_forward(self) -> int:
        """Parameters of one expert, or of the one there is: 3 (gated) or 2 matrices of hidden * ffn."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def whole(self) -> int:
        """Parameters of a block that no tensor plan splits: two norms, and a router of hidden * experts."""
        return 2 * self.hidden + (self.hidden * self.experts if self.experts > 1 else 0)

    @property
    def block(self) -> int:
        """attention + experts * feed_forward + whole."""
        return self.attention + self.experts * self.feed_forward + self.whole

    @property
    def embedding(self) -> int:
        """vocab * hidden."""
        return self.vocab * self.hidden

    @property
    def table(self) -> int:
        """Of positions: sequence * hidden, if there is one."""
        return self.sequence * self.hidden if self.positions else 0

    @property
    def head(self) -> int:
        """The last norm, and vocab * hidden unless tied."""
        return self.hidden + (0 if self.tied else self.embedding)

    @property
    def params(self) -> int:
        """embedding + table + layers * block + head."""
        return self.embedding + self.table + self.layers * self.block + self.head

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with: of the experts ``top_k``, of embedding and head one."""
        unused = max(self.experts - self.top_k, 0) * self.feed_forward if self.experts > 1 else 0
        return self.layers * (self.block - unused) + self.hidden + self.embedding


def read_model(config: ModelConfig, key: str = "model") -> Model | int | None:
    """Judge the node.

    Returns:
        The model; the number of parameters if only that is said; ``None`` if nothing is.

    Raises:
        ConfigurationError: Names every value out of range, and what is missing for a shape.
    """
    numbers = {name: value for name, value in vars(config).items() if value is not None and not isinstance(value, bool)}
    problems = [f"{key}.{name}={value}: must be at least 1" for name, value in numbers.items() if value < 1]
    said = [name for name in _SHAPE if name in numbers]
    if config.params is not None and said:
        problems.append(f"{key}.params={config.params} and {key}.{said[0]}={numbers[said[0]]}: say the number or the shape")
    missing = [name for name in _SHAPE if said and name not in numbers]
    if missing and config.params is None:
        problems.append(f"{key}.{said[0]}={numbers[said[0]]} is part of a shape, which needs {', '.join(missing)} too")
    if not problems and said:
        problems = _judge_shape(config, key)
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    if not said:
        return config.params
    shape = {name: value for name, value in vars(config).items() if name != "params"}
    return Model(**{**shape, "kv_heads": config.kv_heads or config.heads})


def _judge_shape(config: ModelConfig, key: str) -> list[str]:
    hidden, heads = config.hidden or 1, config.heads or 1
    kv_heads = config.kv_heads or heads
    problems: list[str] = []
    if hidden % heads:
        problems.append(f"{key}.hidden={hidden} does not divide by {key}.heads={heads}")
    if heads % kv_heads:
        problems.append(f"{key}.heads={heads} does not divide by {key}.kv_heads={kv_heads}")
    if 1 < config.experts < config.top_k:
        problems.append(f"{key}.top_k={config.top_k} is more than {key}.experts={config.experts}")
    return problems
