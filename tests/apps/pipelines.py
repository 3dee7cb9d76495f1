"""The pipelines that must train as one process does, by world size. Imports no torch: the tests list them too."""

from collections.abc import Sequence
from typing import Any

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
BOTH = ("sgd", "adamw")
MOST = dict.fromkeys(("LoopedBFS", "InterleavedZeroBubble", "DualPipeV"), ("adamw",))
"""Schedules that differ from another in little: at 4 ranks with one optimizer."""
EXPERTS = {"ep_size": 2, "ep_plan": "auto"}
FEW = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""One schedule of each kind."""
SEQUENCE = {"enable_sequence_parallel": True}

AS_USERS = {"pp3 1F1B", "pp2 fsdp2 1F1B", "pp2 tp2 sequence", "pp2 ep2 1F1B"}
"""Pipelines of more than two ranks whose parameters are stepped by torch's optimizers themselves, see steps.py."""


def case(
    schedule: str = "1F1B",
    microbatches: int = 4,
    *,
    model: str = "gpt",
    optimizers: Sequence[str] = ("adamw",),
    batch: int = 8,
    **more: Any,
) -> dict[str, Any]:
    """One layout; what the app itself does not know goes into the config."""
    own = {name: more.pop(name) for name in ("sizes", "accumulate", "ragged", "interrupt", "meta") if name in more}
    pipeline = {"schedule": schedule, "microbatches": microbatches, **more.pop("pipeline", {})}
    return {
        "model": model,
        "optimizers": optimizers,
        "batch": batch,
        **own,
        "config": {"pp_size": 2, **more, "pipeline": pipeline},
    }


FIRST = ["token_embedding", "position_embedding"]
CASES: dict[int, dict[str, Any]] = {
    2: {
        **{f"gpt {s}": case(s, optimizers=BOTH) for s in SCHEDULES},
        **{f"llama {s}": case(s, model="llama") for s in ("1F1B", "ZBVZeroBubble")},
        "two streams": case(model="two"),
        "experts on one rank": case(model="moe", ep_plan="auto"),
        "experts left alone": case("Interleaved1F1B", model="moe"),
        "5 blocks interleaved": case("Interleaved1F1B", sizes={"layers": 5}),
        "embeddings alone": case(pipeline={"split": [FIRST, ["layers.*", "norm", "head"]]}),
        "head alone": case(pipeline={"split": [[*FIRST, "layers.*"], ["norm", "head"]]}),
        "accumulate": case(microbatches=2, accumulate=2),
        "accumulate V": case("ZBVZeroBubble", accumulate=2),
        "evaluate between": case(microbatches=2, accumulate=2, interrupt=True),
        "shapes that change": case(microbatches=2, accumulate=2, ragged=True),
        "shapes that change V": case("ZBVZeroBubble", accumulate=2, ragged=True),
        "meta": case("Interleaved1F1B", model="llama", meta=True),
        "recompute": case(activation_checkpointing="full"),
        "offload": case(fsdp={"cpu_offload": True}),
    },
    3: {
        "pp3 1F1B": case("1F1B", 3, optimizers=BOTH, batch=12, sizes={"layers": 4}, pp_size=3),
        "pp3 interleaved": case("Interleaved1F1B", 6, batch=12, sizes={"layers": 6}, pp_size=3),
    },
    4: {
        **{f"pp4 {s}": case(s, 8, optimizers=MOST.get(s, BOTH), sizes={"layers": 8}, pp_size=4) for s in SCHEDULES},
        **{f"pp2 fsdp2 {s}": case(s, optimizers=BOTH, dp_shard=2) for s in FEW},
        "pp2 fsdp2 llama": case(model="llama", dp_shard=2),
        "pp2 fsdp2 accumulate": case(microbatches=2, accumulate=2, dp_shard=2),
        "pp2 fsdp2 shapes that change": case(microbatches=2, accumulate=2, ragged=True, interrupt=True, dp_shard=2),
        "pp2 ddp2 zero bubble": case("InterleavedZeroBubble", 4, batch=16, accumulate=2, ragged=True, dp_replicate=2),
        **{f"pp2 ep2 {s}": case(s, model="moe", dp_shard=2, **EXPERTS) for s in FEW},
        "pp2 ep2 accumulate": case(microbatches=2, accumulate=2, model="moe", dp_shard=2, **EXPERTS),
        "pp2 tp2": case(optimizers=BOTH, tp_size=2),
        "pp2 tp2 llama": case("Interleaved1F1B", model="llama", tp_size=2),
        "pp2 tp2 zero bubble": case("InterleavedZeroBubble", tp_size=2),
        "pp2 tp2 sequence": case(optimizers=BOTH, tp_size=2, **SEQUENCE),
        "pp2 tp2 sequence V": case("ZBVZeroBubble", tp_size=2, **SEQUENCE),
    },
    8: {
        "pp2 fsdp4": case(optimizers=BOTH, batch=16, dp_shard=4),
        "pp2 hsdp2x2": case(batch=16, dp_replicate=2, dp_shard=2),
        "pp2 ep2 efsdp2": case("Interleaved1F1B", model="moe", batch=16, dp_shard=4, **EXPERTS),
        "pp2 fsdp2 tp2": case(optimizers=BOTH, dp_shard=2, tp_size=2),
        "pp2 fsdp2 tp2 sequence": case("Interleaved1F1B", dp_shard=2, tp_size=2, **SEQUENCE),
    },
}
