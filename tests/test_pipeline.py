"""Pipelines of real processes train as one process does, under every schedule and together with the other axes."""

import json
from pathlib import Path
from typing import Any

import pytest

from processes import body_lines, run, torchrun

LIMIT = 1e-5
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SEQUENCE = {"enable_sequence_parallel": True}


def case(
    schedule: str = "1F1B", microbatches: int = 4, *, model: str = "gpt", optimizer: str = "adamw", batch: int = 8, **more: Any
) -> dict[str, Any]:
    """One layout; what the app itself does not know goes into the config."""
    own = {name: more.pop(name) for name in ("sizes", "accumulate", "ragged", "interrupt", "meta") if name in more}
    pipeline = {"schedule": schedule, "microbatches": microbatches, **more.pop("pipeline", {})}
    return {
        "model": model,
        "optimizer": optimizer,
        "batch": batch,
        **own,
        "config": {"pp_size": 2, **more, "pipeline": pipeline},
    }


FIRST = ["token_embedding", "position_embedding"]
CASES: dict[int, dict[str, Any]] = {
    2: {
        **{f"gpt {s} {o}": case(s, optimizer=o) for s in SCHEDULES for o in ("sgd", "adamw")},
        **{f"llama {s}": case(s, model="llama") for s in SCHEDULES},
        "two streams": case(model="two"),
        "two streams V": case("ZBVZeroBubble", model="two"),
        "5 blocks": case(sizes={"layers": 5}),
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
        "recompute V": case("ZBVZeroBubble", activation_checkpointing="full"),
        "offload": case(fsdp={"cpu_offload": True}),
    },
    3: {
        "pp3 GPipe": case("GPipe", sizes={"layers": 6}, pp_size=3),
        "pp3 1F1B": case("1F1B", 3, batch=12, sizes={"layers": 7}, pp_size=3),
        "pp3 interleaved": case("Interleaved1F1B", 6, batch=12, sizes={"layers": 6}, pp_size=3),
    },
    4: {
        **{f"pp4 {s}": case(s, 8, sizes={"layers": 8}, pp_size=4) for s in SCHEDULES},
        **{f"pp2 fsdp2 {s}": case(s, dp_shard=2) for s in SCHEDULES},
        "pp2 fsdp2 sgd": case(optimizer="sgd", dp_shard=2),
        "pp2 fsdp2 llama": case(model="llama", dp_shard=2),
        "pp2 fsdp2 meta": case(dp_shard=2, meta=True),
        "pp2 fsdp2 accumulate": case(microbatches=2, accumulate=2, dp_shard=2),
        "pp2 fsdp2 shapes that change": case(microbatches=2, accumulate=2, ragged=True, interrupt=True, dp_shard=2),
        "pp2 ddp2": case(dp_replicate=2),
        "pp2 ddp2 zero bubble": case("InterleavedZeroBubble", 4, batch=16, accumulate=2, ragged=True, dp_replicate=2),
        "pp2 tp2": case(tp_size=2),
        "pp2 tp2 llama": case("Interleaved1F1B", model="llama", tp_size=2),
        "pp2 tp2 zero bubble": case("InterleavedZeroBubble", tp_size=2),
        "pp2 tp2 sequence": case(tp_size=2, **SEQUENCE),
        "pp2 tp2 sequence V": case("ZBVZeroBubble", tp_size=2, **SEQUENCE),
    },
    8: {
        "pp2 fsdp4": case(batch=16, dp_shard=4),
        "pp2 hsdp2x2": case(batch=16, dp_replicate=2, dp_shard=2),
        "pp2 fsdp2 tp2": case(dp_shard=2, tp_size=2),
        "pp2 fsdp2 tp2 sequence": case("Interleaved1F1B", dp_shard=2, tp_size=2, **SEQUENCE),
        "pp2 ddp2 tp2": case(dp_replicate=2, tp_size=2),
        "pp4 fsdp2": case("ZBVZeroBubble", sizes={"layers": 8}, pp_size=4, dp_shard=2),
    },
}


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", CASES)
def test_pipelines_train_as_one_process(size: int, tmp_path: Path) -> None:
    cases = CASES[size]
    outcome = run(torchrun(size, "pipeline_parity.py", json.dumps(cases)), tmp_path, deadline=880)
    assert outcome.code == 0, outcome.text[-8000:]
    reports = [json.loads(line.removeprefix("BODY ")) for line in body_lines(outcome)]
    assert sorted((report["name"], report["rank"]) for report in reports) == sorted((n, r) for n in cases for r in range(size))
    apart = {
        (r["name"], what): r[what] for r in reports for what in ("loss", "norm", "weight", "output") if not r[what] <= LIMIT
    }
    assert not apart
    assert [r["name"] for r in reports if not r["covers"]] == []


@pytest.mark.processes
def test_refusals_are_the_same_on_every_rank_and_leave_the_pipeline_whole(tmp_path: Path) -> None:
    outcome = run(torchrun(2, "pipeline_refusals.py"), tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    first, second = (json.loads(line.removeprefix("BODY ")) for line in body_lines(outcome))
    assert {first.pop("rank"), second.pop("rank")} == {0, 1}
    assert first == second
    assert float(first.pop("apart")) <= LIMIT
    assert first["call"] == (
        "a model in 2 pipeline stages has no output to call backward() on: each stage runs its own backward as the schedule "
        "says\n  try: loss = hydra_parallelism.forward_backward(model, inputs, targets, loss_fn), or torch.no_grad() around "
        "the call"
    )
    assert first["batch"] == first["evaluation"]
    assert first["batch"] == (
        "parallelism.pipeline.microbatches=4 does not divide the batch of 6 samples of this data rank, and the parts must "
        "be equal\n  try: parallelism.pipeline.microbatches=3, or 8 samples"
    )
    assert first["cache"] == (
        "the output of the model holds something of type object, and each of the 4 micro-batches makes one of its own\n"
        "  try: an output of tensors (Transformers: use_cache=False)"
    )
    assert " (stage 1) reads what embed (stage 0) computes, and a pipeline hands on only" in first["flow"]
    assert first["tied"].startswith("token_embedding.weight (stage 0) and head.weight (stage 1) are one parameter")
