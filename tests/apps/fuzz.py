"""Random layouts of random models, each trained two steps and compared with one process: ``fuzz.py SEED COUNT [ONLY]``.

Every rank draws the same cases, and reports one JSON line for each: how far it was from the single process, the refusal, or
whatever else happened. ``ONLY`` runs one case, by its number.
"""

import json
import logging
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import _app
import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import Shards
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hydra_parallelism import ConfigurationError, current, forward_backward, parallel_context, parallelize, shard_sequence
from hydra_parallelism.store import PRESETS

STEPS, LR = 2, 0.05
_DEGREES = ("pp_size", "dp_replicate", "dp_shard", "tp_size")
_PRESETS = [name for name in PRESETS if name not in ("cfg", "hsdp", "single")]  # their numbers come from Hydra
_SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
_WRAPS = {
    "gpt": [["Block"], ["layers.*"], ["MLP", "layers.*.attention"], ["GPT"], ["layers.*", "head"], ["Attention", "layers.0"]],
    "llama": [["LlamaBlock"], ["SwiGLU"], ["layers.*.mlp"], ["head", "LlamaBlock"], ["embed", "layers.*"], ["RMSNorm"]],
}
_PLANS: dict[str, list[dict[str, str]]] = {
    "gpt": [
        {"layers.*.mlp.up": "colwise"},
        {"head": "replicate"},
        {"token_embedding": "embedding_colwise", "position_embedding": "embedding_rowwise"},
        {"layers.*.attention.[qkv]_proj": "colwise_rep", "layers.*.attention.o_proj": "rowwise_rep"},
        {"layers.*.mlp.up": "colwise_rep", "layers.*.mlp.down": "rowwise_rep"},
        {"layers.*.mlp.up": "replicate", "layers.*.mlp.down": "replicate"},
        {"layers.0.mlp.*": "replicate"},
        {"layers.*.mlp_norm": "replicate"},
        {"norm": "replicate"},
        {"layers.*.mlp.up": "replicate"},  # down expects a slice
        {"layers.*.attention.k_proj": "replicate"},
        {"layers.*.attention.o_proj": "rowwise_rep"},
        {"layers.*.attention.v_proj": "colwise_rep"},
        {"head": "colwise"},
        {"layers.*.mlp.down": "rowwise_rep"},
        {"layers.*.attention_norm": "sequence_parallel"},
        {"layers.*.attn.q_proj": "colwise"},  # no such module
    ],
    "llama": [
        {"head": "colwise_rep", "embed": "embedding_rowwise"},
        {"embed": "embedding_colwise"},
        {"embed": "embedding_colwise", "head": "rowwise_rep"},
        {"layers.*.self_attn.[qkvo]_proj": "replicate", "layers.*.self_attn.[qk]_norm": "replicate"},
        {"layers.*.mlp.*": "replicate"},
        {"norm": "replicate", "layers.*.*_norm": "replicate"},
        {"layers.1.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise_rep"},
        {"layers.*.self_attn.[qk]_norm": "colwise"},
        {"layers.*.self_attn.k_proj": "replicate"},
        {"layers.*.mlp.gate_proj": "colwise_rep"},
        {"layers.*.self_attn.[qk]_norm": "replicate"},
        {"layers.*.mlp.down_proj": "replicate"},
    ],
}


@dataclass
class Case:
    """One layout of one model."""

    number: int
    config: dict[str, Any]
    model: str
    sizes: dict[str, Any]
    local_batch: int
    sequence: int
    seed: int
    untied: bool = False
    meta: bool = False
    steps: int = field(default=STEPS)


def factors(draw: random.Random, world: int) -> dict[str, int]:
    """Degrees whose product is the world, most often."""
    degrees = dict.fromkeys(_DEGREES, 1)
    rest = world
    while rest > 1:
        prime = next(n for n in range(2, rest + 1) if rest % n == 0)
        degrees[draw.choice(_DEGREES)] *= prime
        rest //= prime
    if draw.random() < 0.1:
        degrees[draw.choice(_DEGREES)] = draw.choice([-1, 2, 3, 5])
    return {name: degree for name, degree in degrees.items() if degree != 1 or draw.random() < 0.2}


def choose(draw: random.Random, usual: Any, *others: Any, odds: float = 0.5) -> Any:
    """One of some values, the first with the given odds."""
    return usual if draw.random() < odds else draw.choice(others)


def sizes(draw: random.Random, model: str, world: int, layers: int, has_tp: bool) -> dict[str, Any]:
    """Widths that often divide, and often do not."""
    kv = draw.choice([world, world, 2 * world, 3, 2] if has_tp else [1, 2, 3, 4, 6])
    heads, head_dim = kv * draw.choice([1, 1, 2, 3]), draw.choice([2, 4, 6, 10])
    made: dict[str, Any] = {
        "vocab": choose(draw, 12 * world, 17, 30, 31, 48, odds=0.85 if has_tp else 0.5),
        "dim": heads * head_dim,
        "num_layers": layers,
        "heads": heads,
        "hidden": choose(draw, 12 * world, 7, 15, 20, 33, odds=0.85 if has_tp else 0.5),
    }
    if model == "gpt":
        return {**made, "seq_len": 24}
    return {**made, "kv_heads": kv, "packed": draw.random() < 0.25}


def plan(draw: random.Random, model: str, has_tp: bool) -> Any:
    """Most often what works."""
    kind = draw.random()
    if kind < (0.65 if has_tp else 0.25):
        return "auto"
    if kind < (0.67 if has_tp else 0.8):
        return None
    return dict(draw.choice(_PLANS[model]))


def pipeline(draw: random.Random, layers: int, pp: int) -> dict[str, Any]:
    """Schedule, micro-batches, and sometimes a split by name."""
    made: dict[str, Any] = {"schedule": draw.choice(_SCHEDULES)}
    if draw.random() < 0.7:
        made["microbatches"] = draw.choice([2, 3, 4, 6, 2 * pp, 4 * pp])
    if draw.random() < 0.15:
        cut = draw.randrange(1, layers + 1)
        names = [f"layers.{n}" for n in range(layers)]
        made["split"] = [["*embed*", *names[:cut]], [*names[cut:], "norm", "head"]]
    return made


def cases(seed: int, count: int, world: int) -> Iterator[Case]:
    """Draw the cases of a seed; each depends on its number alone."""
    for number in range(count):
        draw = random.Random(f"{seed}/{number}/{world}")
        model, preset = draw.choice(["gpt", "llama"]), draw.random() < 0.15
        degrees = dict(PRESETS[draw.choice(_PRESETS)]) if preset else factors(draw, world)
        pp, tp = degrees.get("pp_size", 1), degrees.get("tp_size", 1)
        layers = max(1, pp if pp > 0 else world) * draw.choice([1, 2, 2, 2]) + choose(draw, 0, 1, -1, odds=0.8) or 1
        config: dict[str, Any] = {**degrees, "pipeline": pipeline(draw, layers, pp), "fsdp": {}}
        config["tp_plan"] = plan(draw, model, tp != 1)
        config["enable_sequence_parallel"] = draw.random() < (0.5 if tp != 1 else 0.1) and config["tp_plan"] is not None
        config["activation_checkpointing"] = choose(draw, "none", "full", 1, 2, 3, 9)
        config["fsdp"]["wrap"] = choose(draw, "auto", *_WRAPS[model], odds=0.6)
        config["fsdp"]["reshard_after_forward"] = draw.random() < 0.7
        config["fsdp"]["cpu_offload"] = draw.random() < 0.15
        chosen = config["pipeline"].get("microbatches", 4 * abs(pp))
        yield Case(
            number,
            config,
            model,
            sizes(draw, model, world, layers, tp != 1),
            local_batch=chosen * draw.choice([1, 2]) if pp != 1 and draw.random() < 0.85 else draw.choice([1, 2, 3, 5]),
            sequence=choose(draw, 12, 1, 5, 7, 8, 24, 25, odds=0.6),
            seed=draw.randrange(1000),
            untied=draw.random() < (0.95 if pp != 1 else 0.3),
            meta=draw.random() < 0.1,
        )


def build(case: Case) -> nn.Module:
    """The model of a case, with its weights."""
    torch.manual_seed(case.seed)
    if case.model == "gpt":
        return models.GPT(**case.sizes)
    model = models.Llama(**case.sizes)
    if case.untied:
        model.head.weight = nn.Parameter(model.head.weight.detach().roll(1, 0).clone())
    return model


def batch(case: Case, step: int, shares: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(case.seed * 100 + step)
    tokens = torch.randint(0, case.sizes["vocab"], (case.local_batch * shares, case.sequence + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(case: Case, model: nn.Module, share: int, shares: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this share, and the whole gradients of the last step by name."""
    optimizer, losses = Shards(partial(torch.optim.SGD, lr=LR), model.parameters()), []
    for step in range(case.steps):
        optimizer.zero_grad()
        pair = (part[share * case.local_batch :][: case.local_batch] for part in batch(case, step, shares))
        inputs, targets, positions = shard_sequence(*pair, torch.arange(case.sequence)[None])
        loss = forward_backward(model, (inputs, positions), targets, loss_of)
        dist.all_reduce(loss, group=current().mesh["cp"].get_group())
        losses.append(loss.item() / current().topology.cp)
        if step + 1 < case.steps:
            optimizer.step()
    return losses, {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def reference(case: Case, share: int, shares: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same in plain torch on the global batch, this share's losses told apart."""
    model, losses = build(case), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(case.steps):
        optimizer.zero_grad()
        inputs, targets = batch(case, step, shares)
        logits = model(inputs)
        mine = slice(share * case.local_batch, (share + 1) * case.local_batch)
        losses.append(loss_of(logits[mine], targets[mine]).item())
        loss_of(logits, targets).backward()
        if step + 1 < case.steps:
            optimizer.step()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """The full tensor. Collective over its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(case: Case) -> dict[str, Any]:
    """Train one case and say what came of it. Collective."""
    try:
        with parallel_context({**case.config, "runtime": {"timeout_s": 30, "start_timeout_s": 30}}) as context:
            return compare(case, context)
    except ConfigurationError as error:
        return {"refused": str(error)}


def compare(case: Case, context: Any) -> dict[str, Any]:
    """Largest deviations of losses and gradients on this rank, the latter also beside the largest entry of their tensor."""
    if case.sequence > case.sizes.get("seq_len", math.inf):
        case.sequence = case.sizes["seq_len"]
    share, shares = context.dp_rank, context.dp_world_size
    torch.manual_seed(case.seed)
    if case.meta:
        weights = build(case).state_dict() if context.rank == 0 else {}
        with torch.device("meta"):
            model = build(case)
        model = parallelize(model, context, state_dict=weights)
    else:
        model = parallelize(build(case), context)
    losses, gradients = train(case, model, share, shares)
    wanted, grads = reference(case, share, shares)
    names = set(grads) if context.topology.pp == 1 else set(gradients)
    missing = sorted((names ^ set(gradients)) | (set(dict(model.named_parameters())) - set(gradients)))
    apart = {name: (gradients[name] - grads[name]).abs().max().item() for name in gradients}
    noise = 1e-2 * max(gradient.abs().max().item() for gradient in grads.values())  # some gradients are rounding error alone
    relative = {name: off / (grads[name].abs().max().item() + noise) for name, off in apart.items()}
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "gradient": max(apart.values()),
        "relative": max(relative.values()),
        "worst": max(relative, key=relative.__getitem__),
        "missing": missing,
    }


def report(seed: int, count: int, only: int = -1) -> list[dict[str, Any]]:
    """Run the cases of a seed, or one of them, and say what came of each on this rank. Collective."""
    rank, world, found = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), []
    for case in cases(seed, count, world):
        if only not in (-1, case.number):
            continue
        began, told = time.monotonic(), asdict(case)
        try:
            result = run(case)
        except Exception as error:  # a defect, told as the result of this case
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
        took = round(time.monotonic() - began, 2)
        found.append({"number": case.number, "rank": rank, **result, "took": took, "case": told})
        if "error" in result and dist.is_initialized():
            _app.say(json.dumps(found[-1]))
            os._exit(1)  # the others may be waiting for this rank
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for line in report(*map(int, sys.argv[1:])):
        _app.say(json.dumps(line))
