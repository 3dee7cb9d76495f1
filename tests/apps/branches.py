"""Guided predictions on the ranks along ``cfg`` against one process, and what they refuse together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from hydra_parallelism import ConfigurationError, ParallelContext, forward_backward, guided, parallel_context, parallelize

SCALE = 3.0


class Net(nn.Module):
    """Blocks under a class; returns containers with numbers that are not combined."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Embedding(5, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = x + self.classes(label)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Contained(Net):
    """The same in containers, in two dtypes, with a label and a name that are not combined."""

    def forward(self, x: Tensor, label: Tensor) -> Any:
        out = super().forward(x, label)
        return {"half": out.bfloat16()[:, :3], "label": label, "more": (out, "name", None)}


class Moody(Net):
    """Another shape in each branch."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return super().forward(x, label)[:, : 8 if label[0] == 4 else 16]


def make(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    return {"x": x, "label": torch.arange(8) % 4}, {"x": x, "label": torch.full((8,), 4)}


def batched(model: nn.Module) -> Any:
    """Both branches in one batch, by hand."""
    cond, uncond = inputs()
    with torch.no_grad():
        c, u = model(**{name: torch.cat([cond[name], uncond[name]]) for name in cond}).chunk(2)
    return u + SCALE * (c - u)


def bits(tensor: Tensor) -> str:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes().hex()


def predict(context: ParallelContext) -> dict[str, Any]:
    """The prediction of a parallelized model, how far off it is, and what it sent over ``cfg``."""
    model = parallelize(make(), context).eval()
    cond, uncond = inputs()
    rows = slice(context.dp_rank * 4, context.dp_rank * 4 + 4) if context.dp_world_size > 1 else slice(None)
    cond, uncond = ({name: value[rows] for name, value in branch.items()} for branch in (cond, uncond))
    found, sent = guided(model, cond, uncond, SCALE), {}
    if context.topology.pp == 1:  # torch's counter loses its place in a module that runs in stages
        with CommDebugMode() as seen:
            found = guided(model, cond, uncond, SCALE)
        sent = {str(name).split(".")[-1]: count for name, count in seen.get_comm_counts().items()}
    wanted = batched(make())[rows]
    return {
        "bits": bits(found),
        "equal": torch.equal(found, wanted),
        "off": (found - wanted).abs().max().item(),
        "sent": sent,
        "requires_grad": found.requires_grad,
        "dp_rank": context.dp_rank,
    }


def refusals(context: ParallelContext) -> dict[str, Any]:
    """What is refused on both ranks alike, and that they go on afterwards."""
    model = parallelize(make(), context).eval()
    cond, uncond = inputs()
    mine = {**cond, "x": cond["x"] + context.rank}
    failing = make()
    if context.rank == 1:
        failing.forward = lambda **_: 1 / 0
    loose = {"x": cond["x"].clone().requires_grad_(), "label": cond["label"]}
    tuned = parallelize(make(), context).eval()
    tuned.head.requires_grad_(True)
    return {
        "training": refusal(lambda: forward_backward(model, cond, cond["x"], nn.functional.mse_loss)),
        "backward": refusal(lambda: model(**cond).sum().backward()),
        "thawed": refusal(lambda: tuned(**cond).sum().backward()),
        "different": refusal(lambda: guided(make(), mine, {**uncond, "x": mine["x"]}, SCALE)),
        "scales": refusal(lambda: guided(make(), cond, uncond, 1.0 + context.rank)),
        "shapes": refusal(lambda: guided(make(Moody), cond, uncond, SCALE)),
        "failing": refusal(lambda: guided(failing, cond, uncond, SCALE)),
        "input_gradient": bool(torch.autograd.grad(model(**loose).sum(), loose["x"])[0].abs().sum() > 0),
        "goes_on": torch.equal(guided(model, cond, uncond, SCALE), batched(make())),
    }


def containers() -> dict[str, Any]:
    """What comes of a dict with a tuple in it."""
    cond, uncond = inputs()
    found = guided(make(Contained), cond, uncond, SCALE)
    whole = guided(make(), cond, uncond, SCALE)
    out, name, nothing = found["more"]
    return {
        "out": torch.equal(out, whole),
        "half": [str(found["half"].dtype), bits(found["half"])],
        "label": found["label"].tolist(),
        "rest": [name, nothing],
    }


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ConfigurationError, ZeroDivisionError) as error:
        return str(error)
    return "not refused"


def report(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On each layout given as ``{name: config}``; with ``cfg`` alone also what is refused."""
    found: dict[str, Any] = {}
    for name, config in layouts.items():
        with parallel_context(config) as context:
            found[name] = predict(context)
            if name == "cfg":
                found |= {"refusals": refusals(context), "containers": containers()}
    return found
