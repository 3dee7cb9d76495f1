"""What `hydra-parallelism plan` estimates against what the training example really sends and holds, on gloo processes.

    python benchmarks/estimates.py              # all layouts, on 1, 2, 4 and 8 processes; writes the table into docs/plan.md
    python benchmarks/estimates.py FILE NAME... # some layouts, their numbers as JSON into a file

Each layout trains two steps of `examples/training.py`, then a third is counted: every collective with its group (see
`counted.py`), turned into the bytes that a rank sends under the algorithms that the plan uses too. Nothing is timed.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "examples")]

import torch  # noqa: E402
import training  # noqa: E402
from counted import Counted, Kept, held  # noqa: E402
from mixture import MixtureGPT  # noqa: E402
from model import GPT  # noqa: E402

from hydra_parallelism import ParallelContext, parallel_context, parallelize  # noqa: E402
from hydra_parallelism.plan.composition import Case  # noqa: E402
from hydra_parallelism.plan.machine import MachineConfig, read_machine  # noqa: E402
from hydra_parallelism.plan.memory import activations, memory_of  # noqa: E402
from hydra_parallelism.plan.model import Model, ModelConfig, read_model  # noqa: E402
from hydra_parallelism.plan.schedules import microbatches_of  # noqa: E402
from hydra_parallelism.plan.traffic import traffic  # noqa: E402

VOCAB, LOCAL_BATCH = 256, 8
_DEADLINE = 300
SIZES = {"dim": 64, "num_layers": 4, "heads": 4, "hidden": 256, "seq_len": 64}
"""conf/model/tiny.yaml, with four blocks, so that there may be four stages."""
EXPERTS = {**SIZES, "hidden": 64, "experts": 8, "top_k": 2}
"""conf/model/experts.yaml, likewise."""

_TP = {"tp_size": 2, "tp_plan": "auto"}
_SP = {**_TP, "enable_sequence_parallel": True}
_EP = {"ep_plan": "auto"}
_RING, _ULYSSES = {"context_parallel": {"ring_degree": 2}}, {"context_parallel": {"ulysses_degree": 2}}
_INTERLEAVED = {"pipeline": {"schedule": "Interleaved1F1B"}}

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one process": {}},
    2: {
        "ddp 2": {"dp_replicate": 2},
        "fsdp 2": {"dp_shard": 2},
        "fsdp 2, kept after forward": {"dp_shard": 2, "fsdp": {"reshard_after_forward": False}},
        "fsdp 2, bf16": {"dp_shard": 2, "fsdp": {"mixed_precision": "bf16"}},
        "tp 2": _TP,
        "tp 2, bf16": {**_TP, "fsdp": {"mixed_precision": "bf16"}},
        "tp 2, recomputed": {**_TP, "activation_checkpointing": "full"},
        "tp 2, sequence parallel": _SP,
        "pp 2, 1F1B": {"pp_size": 2},
        "pp 2, interleaved": {"pp_size": 2, **_INTERLEAVED},
        "ring 2": _RING,
        "ulysses 2": _ULYSSES,
        "ep 2": {"dp_shard": 2, "ep_size": 2, **_EP},
        "tp 2, experts whole": {**_TP, **_EP},
    },
    4: {
        "ddp 4": {"dp_replicate": 4},
        "fsdp 4": {"dp_shard": 4},
        "hsdp 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
        "fsdp 2 x tp 2": {"dp_shard": 2, **_TP},
        "fsdp 2 x tp 2, sequence parallel": {"dp_shard": 2, **_SP},
        "pp 4, 1F1B": {"pp_size": 4},
        "pp 2 x fsdp 2, 1F1B": {"pp_size": 2, "dp_shard": 2},
        "pp 2 x fsdp 2, interleaved": {"pp_size": 2, "dp_shard": 2, **_INTERLEAVED},
        "ring 4": {"context_parallel": {"ring_degree": 4}},
        "ulysses 4": {"context_parallel": {"ulysses_degree": 4}},
        "ring 2 x ulysses 2": {"context_parallel": {"ring_degree": 2, "ulysses_degree": 2}},
        "ep 4": {"dp_shard": 4, "ep_size": 4, **_EP},
        "fsdp 4, ep 2": {"dp_shard": 4, "ep_size": 2, **_EP},
    },
    8: {
        "fsdp 8": {"dp_shard": 8},
        "hsdp 2 x 2 x tp 2": {"dp_replicate": 2, "dp_shard": 2, **_TP},
        "pp 2 x fsdp 2 x tp 2": {"pp_size": 2, "dp_shard": 2, **_TP},
        "fsdp 2 x ring 2 x tp 2": {"dp_shard": 2, **_RING, **_TP},
    },
}
"""World size -> layout -> config."""


def described(context: ParallelContext) -> Model:
    """The example's model as numbers, and what it computes on at a time."""
    mixture = bool(context.config.ep_plan)
    micro_batch = LOCAL_BATCH // microbatches_of(context.config.pipeline, context.topology.pp)
    sizes = EXPERTS if mixture else SIZES
    numbers = {"hidden": sizes["dim"], "layers": sizes["num_layers"], "heads": sizes["heads"], "ffn": sizes["hidden"]}
    numbers |= {"vocab": VOCAB, "sequence": sizes["seq_len"], "micro_batch": micro_batch}
    extra = {"experts": EXPERTS["experts"], "top_k": EXPERTS["top_k"]} if mixture else {"gated": False}
    read = read_model(ModelConfig(**numbers, **extra, positions=True))
    assert isinstance(read, Model)
    return read


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """One layout on this rank: axis -> bytes estimated and counted, and the same of what it holds."""
    with parallel_context({**config, "runtime": {"timeout_s": 120}}) as context:
        torch.manual_seed(0)
        made = MixtureGPT(VOCAB, **EXPERTS) if context.config.ep_plan else GPT(VOCAB, **SIZES)
        model = parallelize(made)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        drawn = torch.Generator().manual_seed(context.dp_rank)
        windows = torch.randint(0, VOCAB, (LOCAL_BATCH, SIZES["seq_len"] + 1), generator=drawn)
        for _ in range(2):
            training.update(model, optimizer, scaler, windows)
        with Counted() as step:
            training.update(model, optimizer, scaler, windows)
        return {"sent": _sent(step, context), "held": _held(held(model, optimizer), context)}


def _sent(step: Counted, context: ParallelContext) -> dict[str, list[float]]:
    """Axes with the same ranks are one; the first of them gives the name."""
    at = context.topology
    case = Case(at, read_machine(MachineConfig(), at.world_size), context.config, False)
    found: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    names: dict[tuple[int, ...], str] = {}
    for moved in traffic(case, described(context), context.rank):
        ranks = at.group(moved.axis, context.rank)
        names.setdefault(ranks, moved.axis)
        found[ranks][0] += moved.cost.wire_bytes
    for (_, ranks), sent in step.sent.items():
        found[ranks][1] += sent
    return {names.get(ranks, str(ranks)): both for ranks, both in found.items()}


def _held(counted: dict[str, int], context: ParallelContext) -> dict[str, list[float]]:
    memory = memory_of(described(context), context.topology, context.config)
    return {name: [getattr(memory, name), number] for name, number in counted.items()}


def kept_for_backward() -> dict[str, list[float]]:
    """Activations of the plain model on this process: bytes estimated, and kept by autograd."""
    with parallel_context({}) as context:
        model = GPT(VOCAB, **SIZES)
        windows = torch.randint(0, VOCAB, (LOCAL_BATCH, SIZES["seq_len"] + 1))
        with Kept(model) as kept:
            loss = training.loss_of(model(windows[:, :-1]), windows[:, 1:])
        del loss
        return {"activations": [activations(described(context), context.topology, context.config), kept.bytes]}


def _work(rank: int, size: int, port: int, names: list[str], results: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        found = {name: measure(LAYOUTS[size][name]) for name in names}
        if size == 1:
            found[names[0]]["held"] |= kept_for_backward()
    except BaseException as error:
        results.put(error)  # or everybody would wait for this rank
        raise
    results.put(found)


def start(size: int, names: list[str]) -> dict[str, Any]:
    """Run layouts on processes forked from this one; what came of them, over the ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    ranks = [forking.Process(target=_work, args=(rank, size, port, names, results), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    told = []
    for _ in ranks:
        told.append(results.get(timeout=_DEADLINE))
        if isinstance(told[-1], BaseException):
            raise SystemExit(f"{size} processes: {told[-1]}")
    for rank in ranks:
        rank.join()
    return {name: _combine([each[name] for each in told]) for name in names}


def _combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what is sent the mean over the ranks, of what is held the most."""
    axes = dict.fromkeys(axis for rank in ranks for axis in rank["sent"])
    mean = {axis: [sum(rank["sent"].get(axis, [0, 0])[side] for rank in ranks) / len(ranks) for side in (0, 1)] for axis in axes}
    most = {name: [max(rank["held"][name][side] for rank in ranks) for side in (0, 1)] for name in ranks[0]["held"]}
    return {"sent": mean, "held": most}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Two tables in Markdown."""
    lines = ["| layout | axis | sent, estimate | counted | ratio |", "|---|---|---:|---:|---:|"]
    for name, of in found.items():
        lines += [f"| {name} | {axis} | {_row(*both)} |" for axis, both in of["sent"].items()]
    lines += ["", "| layout | held | estimate | counted | ratio |", "|---|---|---:|---:|---:|"]
    for name, of in found.items():
        lines += [f"| {name} | {what} | {_row(*both)} |" for what, both in of["held"].items()]
    return "\n".join(lines)


def _row(estimate: float, counted: float) -> str:
    return f"{estimate:,.0f} | {counted:,.0f} | {estimate / counted if counted else float('nan'):.3f}"


def write(text: str, page: Path, name: str = "estimates") -> None:
    """Put a text between the markers of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no markers {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main(arguments: list[str]) -> None:
    """See the module docstring."""
    wanted = arguments[1:]
    found: dict[str, Any] = {}
    for size, layouts in LAYOUTS.items():
        names = [name for name in layouts if not wanted or name in wanted]
        found |= start(size, names) if names else {}
    if arguments:
        Path(arguments[0]).write_text(json.dumps(found))
        return
    print(table(found))
    write(table(found), _HERE.parent / "docs" / "plan.md")


if __name__ == "__main__":
    main(sys.argv[1:])
