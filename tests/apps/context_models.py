"""What a model must not do with its piece of a sequence, and what it may, under ``ring_degree=2`` on two ranks.

The plain model on whole sequences is what is compared with.
"""

from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hydra_parallelism import ConfigurationError, attention, parallel_context, parallelize, shard_sequence

LENGTH, DIM, HEADS = 8, 8, 2
RING = {"context_parallel": {"ring_degree": 2}}
Mix = Callable[[nn.Module, Tensor], Tensor]


class Around(nn.Module):
    """Two blocks, each of which projects and does one thing more to (batch, sequence, width)."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mix) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """A block."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.zeros(32, DIM))
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mix = (mix,)  # in a tuple, so that it is no method

    def forward(self, x: Tensor) -> Tensor:
        return self.mix[0](self, self.project(x))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def attend(x: Tensor, **options: Any) -> Tensor:
    """Self-attention of one head on the same queries, keys and values."""
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options).transpose(1, 2).flatten(2)


def written_out(x: Tensor) -> Tensor:
    q = heads(x)
    return (torch.softmax(q @ q.transpose(-1, -2), -1) @ q).transpose(1, 2).flatten(2)


def convolve(x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), torch.ones(DIM, DIM, 3), padding=1).transpose(1, 2)


WRONG: dict[str, Mix] = {
    "counts": lambda layer, x: attend(x) + torch.arange(x.shape[1])[None, :, None],
    "table": lambda layer, x: attend(x) + layer.table[: x.shape[1]],
    "wide table": lambda layer, x: attend(x) + layer.table[None][:, : x.shape[1]],
    "narrow": lambda layer, x: attend(x) + layer.table.narrow(0, 0, x.shape[1]),
    "written out": lambda layer, x: written_out(x),
    "module": lambda layer, x: layer.inner(x, x, x, need_weights=False)[0],
    "fast path": lambda layer, x: layer.inner.eval()(x, x, x)[0],
    "mean": lambda layer, x: attend(x) + x.mean(1, keepdim=True),
    "first": lambda layer, x: attend(x) + x[:, 0][:, None],
    "shift": lambda layer, x: attend(x) + torch.roll(x, 1, 1),
    "cumsum": lambda layer, x: attend(x).cumsum(dim=1),
    "convolution": lambda layer, x: attend(x) + convolve(x),
    "mask": lambda layer, x: attend(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)),
    "dropout": lambda layer, x: attend(x, dropout_p=0.5),
    "nothing": lambda layer, x: x,
    "recurrent": lambda layer, x: attend(x) + layer.recurrent(x)[0],
    "zeros before": lambda layer, x: attend(x) + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "linear attention": lambda layer, x: attend(x) + x @ torch.einsum("bsd,bse->bde", x, x),
    "half windows": lambda layer, x: attend(x.unflatten(1, (2, -1)).flatten(0, 1)).unflatten(0, (-1, 2)).flatten(1, 2),
    "class token": lambda layer, x: attend(torch.cat([x[:, :1] * 0, x], 1))[:, 1:],
    "counted": lambda layer, x: attend(x) + torch.linspace(0, 1, x.shape[1])[:, None],
    "pooled": lambda layer, x: attend(x) + x.transpose(1, 2).mean(-1)[:, None],
}
RIGHT: dict[str, Mix] = {
    "rerouted": lambda layer, x: attend(x, is_causal=True),
    "features": lambda layer, x: attend(x).softmax(-1) + x.mean(-1, keepdim=True) + x[..., :1] + x.cumsum(-1) + x[:, :],
}


def call(layer: nn.Module, x: Tensor) -> Tensor:
    """What ``rerouted`` does, asked for by name."""
    return attention(heads(x), heads(x), heads(x), is_causal=True).transpose(1, 2).flatten(2)


def refusal(call: Callable[[], Any]) -> str:
    """The text of a ConfigurationError, or nothing."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


def run(mix: Mix, config: dict[str, Any], plain: Mix | None = None, *, cut: bool = True) -> float:
    """Largest deviation of the output from that of the plain model on whole sequences."""
    torch.manual_seed(0)
    model, x = Around(mix), torch.randn(3, LENGTH, DIM)
    reference = Around(plain or mix)
    reference.load_state_dict(model.state_dict())
    wanted = reference(x).detach()
    found = parallelize(model, config=config)(shard_sequence(x) if cut else x)
    return (found - shard_sequence(wanted)).abs().max().item()


SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def make(kind: str = "llama", **more: Any) -> nn.Module:
    """A model of Transformers."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, num_key_value_heads=2, use_cache=False, **more))


def later() -> str:
    """A table of zeros, told by a call that nobody knows, is noticed once it has been trained."""
    model = parallelize(Around(lambda layer, x: attend(x) + layer.table.index_select(0, torch.tensor([0, 1, 2, 3]))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        for _ in range(20):
            model(shard_sequence(torch.randn(3, LENGTH, DIM))).square().sum().backward()
            optimizer.step()

    return refusal(train)


def stranger() -> str:
    """A model of an earlier context."""
    with parallel_context(RING):
        model = parallelize(Around(RIGHT["rerouted"]))
    with parallel_context({"context_parallel": {"ulysses_degree": 2}}):
        return refusal(lambda: model(shard_sequence(torch.randn(3, LENGTH, DIM))))


def shared_config() -> float:
    """A model whose config another one shares is none of our business."""
    config = AutoConfig.for_model("llama", **SIZES)
    plain, model = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 16
    wanted = plain(tokens).logits.detach()
    parallelize(model)
    return (plain(tokens).logits - wanted).abs().max().item()


def pretrained() -> dict[str, str]:
    """What is refused of a model of Transformers, which would have gone wrong without a word."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 16
    padded, packed = torch.ones_like(tokens), torch.arange(LENGTH)[None] % 3
    padded[1, :3] = 0
    piece, positions = shard_sequence(tokens, packed)
    model, windowed = parallelize(make()), parallelize(make("mistral", sliding_window=3))
    return {
        "padding": refusal(lambda: model(piece, attention_mask=padded)),
        "padding by place": refusal(lambda: model(piece, padded)),
        "generation": refusal(lambda: model.generate(piece)),
        "rows": refusal(lambda: model(piece, output_attentions=True)),
        "roberta": refusal(lambda: parallelize(make("roberta", pad_token_id=1))),
        "hybrid": refusal(lambda: parallelize(make("lfm2", layer_types=["conv", "full_attention"]))(piece)),
        "packed": refusal(lambda: model(piece, position_ids=positions)),
        "labels": refusal(lambda: model(piece, labels=piece)),
        "window": refusal(lambda: windowed(piece)),
    }


def eager() -> float:
    """A model of Transformers that was made with attention written out takes ours like any other."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 16
    torch.manual_seed(0)
    model = make(attn_implementation="eager")
    wanted = shard_sequence(model(tokens).logits.detach())
    return (parallelize(model)(shard_sequence(tokens)).logits - wanted).abs().max().item()


def flux() -> dict[str, float]:
    """A model of diffusers, whose attention joins image and text: both are cut."""
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4}
    widths = {"in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)}
    torch.manual_seed(0)
    model = FluxTransformer2DModel(patch_size=1, guidance_embeds=False, **sizes, **widths)
    image, text, pooled, time = torch.randn(2, 16, 4), torch.randn(2, 8, 16), torch.randn(2, 16), torch.tensor([0.5, 0.5])
    places = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], -1), torch.zeros(8, 3)
    wanted = model(image, text, pooled, time, *places).sample
    wanted.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    model = parallelize(model)
    of_image, of_text = (shard_sequence(place, dim=0) for place in places)
    found = model(shard_sequence(image), shard_sequence(text), pooled, time, of_image, of_text).sample
    found.square().mean().backward()
    apart = [(dict(model.named_parameters())[name].grad.full_tensor() - grad).abs().max() for name, grad in gradients.items()]
    return {
        "flux": (found - shard_sequence(wanted)).abs().max().item(),
        "flux gradients": torch.stack(apart).max().item(),
    }


def report() -> dict[str, Any]:
    """Texts of what is refused, deviations of what is not."""
    with parallel_context(RING):
        found: dict[str, Any] = {name: refusal(lambda mix=mix: run(mix, RING)) for name, mix in WRONG.items()}
        found |= {name: run(mix, RING) for name, mix in RIGHT.items()}
        found["called"] = run(call, RING, plain=RIGHT["rerouted"])
        found["later"] = later()
        found["shared config"] = shared_config()
        found["recomputed"] = run(RIGHT["rerouted"], {**RING, "activation_checkpointing": "full"})
        tokens = shard_sequence(torch.zeros(2, models.LONG, dtype=torch.long))
        found["positions"] = refusal(lambda: parallelize(models.make("gpt_long"))(tokens))
        found["uncut"] = refusal(lambda: run(RIGHT["rerouted"], RING, cut=False))
        found |= pretrained() | {"eager": eager()} | flux()
    found["stranger"] = stranger()
    return found
