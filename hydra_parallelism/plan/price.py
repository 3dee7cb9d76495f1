"""What a case costs, as plain data for the report: memory of the fullest rank, and what a rank sends in a step."""

from typing import Any

from .case import Case
from .fit import check_fit
from .memory import Memory, memory_of
from .model import Model
from .schedules import bubble, microbatches_of
from .traffic import Transfer, traffic

__all__ = ["price"]


def price(case: Case, model: Model | int, rank: int) -> dict[str, Any]:
    """Price a case for a model.

    Returns:
        ``machine`` (memory and links), ``params``, ``memory`` (bytes), ``traffic`` (``None`` when only the number of parameters
        is known), ``seconds`` of all of it one after the other, ``pipeline`` (``None`` without one), ``warnings``.

    Raises:
        ConfigurationError: The layout cannot split the model.
    """
    if not isinstance(model, int):
        check_fit(case, model)
    memory = memory_of(model, case.topology, case.config)
    moved = None if isinstance(model, int) else [_told(each) for each in traffic(case, model, rank)]
    return {
        "machine": {
            "memory_bytes": case.machine.memory,
            "intra": vars(case.machine.intra),
            "inter": vars(case.machine.inter),
        },
        "params": model if isinstance(model, int) else model.params,
        "memory": {**vars(memory), "device": memory.device},
        "traffic": moved,
        "seconds": None if moved is None else sum(each["seconds"] for each in moved),
        "pipeline": _pipeline(case),
        "warnings": _too_much(case, memory),
    }


def _told(moved: Transfer) -> dict[str, Any]:
    row = {name: value for name, value in vars(moved).items() if name != "cost"}
    return {**row, "bytes": moved.cost.wire_bytes, "seconds": moved.cost.seconds}


def _pipeline(case: Case) -> dict[str, Any] | None:
    p, pipeline = case.topology.pp, case.config.pipeline
    if p == 1:
        return None
    count = microbatches_of(pipeline, p)
    return {"schedule": pipeline.schedule.name, "microbatches": count, "bubble": bubble(pipeline.schedule.name, p, count)}


def _too_much(case: Case, memory: Memory) -> list[str]:
    room = case.machine.memory
    if memory.device <= room:
        return []
    at_least = "at least " if memory.activations is None else ""
    return [f"a rank needs {at_least}{memory.device / 1e9:,.1f} GB, but world.memory_gb={room / 1e9:g}"]
