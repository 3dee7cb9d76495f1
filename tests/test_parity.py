"""Every layout trains as one process does: losses, gradient norms and final weights after three steps.

One start of processes for each world size runs all of its layouts (tests/worlds.py); each is a test of its own here.
"""

from functools import cache
from typing import Any

import pytest

import worlds
from apps.layouts import EXTRAS, LAYOUTS, MISTAKES, Case, cases

pytestmark = worlds.MARKS
TOLERANCE = 1e-5
ALL = [(size, case) for size in LAYOUTS for case in cases(size) if case not in MISTAKES.get(size, [])]


def identify(case: Case) -> str:
    """Name of a case, unique within its world size."""
    return f"{case.name}-{case.model}"


@cache
def results(size: int) -> dict[str, dict[str, Any]]:
    """What the cases of a world size came to on rank 0, which has compared whole weights."""
    found = [dict(result) for result in worlds.reports(size)[0]["parity"]]
    return {identify(Case(**result.pop("case"))): result for result in found}


def observations(size: int) -> list[dict[str, Any]]:
    """What tests/apps/observe.py saw, one entry a rank."""
    return [rank["observe"] for rank in worlds.reports(size)]


@pytest.mark.parametrize(("size", "case"), [pytest.param(size, case, id=f"{size}-{identify(case)}") for size, case in ALL])
def test_a_layout_trains_as_one_process(size: int, case: Case) -> None:
    result = results(size)[identify(case)]
    assert "error" not in result, result["error"]
    assert len(result) == 4 * len(case.optimizers)
    assert {k: value for k, value in result.items() if not k.endswith("worst") and not value <= TOLERANCE} == {}, result


@pytest.mark.parametrize("case", MISTAKES[2], ids=identify)
def test_a_mistake_is_noticed(case: Case) -> None:
    result = results(2)[identify(case)]
    assert "error" not in result, result["error"]
    assert result["adamw weights"] > 10 * TOLERANCE
    assert result["adamw norm"] > 10 * TOLERANCE


def test_names_of_cases_are_unique() -> None:
    for size in LAYOUTS:
        names = [identify(case) for case in cases(size)]
        assert len(names) == len(set(names))
    assert set(EXTRAS) <= set(LAYOUTS)


BF16 = {"input": "bfloat16", "inside": "bfloat16", "block": "bfloat16", "output": "float32"}
MASTER = {"weight": "float32", "gradient": "float32"}


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, "bf16"), (2, "bf16"), (2, "bf16_ddp"), (2, "bf16_tp"), (2, "bf16_sp"), (2, "bf16_ep"), (4, "bf16")],
)
def test_mixed_precision_computes_in_bf16_at_every_degree(size: int, layout: str) -> None:
    assert all(seen[layout] == {**BF16, **MASTER} for seen in observations(size))


def test_without_mixed_precision_all_is_float32() -> None:
    assert set(observations(1)[0]["plain"].values()) == {"float32"}


@pytest.mark.parametrize("size", [1, 2])
def test_a_meta_model_gets_the_weights_of_one_process(size: int) -> None:
    assert all(set(seen["meta"].values()) == {True} for seen in observations(size))


def test_everything_at_once_keeps_names_and_ties() -> None:
    for seen in observations(4):
        assert seen["structure"] == {
            "same_names": True,
            "same_keys": True,
            "units": ["", "layers.0", "layers.1"],
            "tied": True,
            "sharded": True,
            "gradients": True,
        }


def test_tokens_travel_in_two_all_to_alls_and_nothing_else_is_gathered() -> None:
    """Of two blocks: FSDP gathers each, its experts, and the root (which stays gathered); each layer tells its counts once."""
    units, layers = 5, 2
    for seen in observations(4):
        assert seen["dispatch"]["forward"] == {"c10d._allgather_base_": units + layers, "c10d.alltoall_base_": 2 * layers}
        assert seen["dispatch"]["backward"] == {
            "c10d._allgather_base_": units - 1,
            "c10d.alltoall_base_": 2 * layers,
            "c10d._reduce_scatter_base_": units,
        }


def test_pieces_of_a_sequence_are_neither_gathered_nor_sent_but_for_attention() -> None:
    """FSDP gathers two blocks and the root, which stays gathered; a ring of two sends keys and values, and their gradients."""
    for seen in observations(2):
        assert seen["ring"] == {
            "forward": {"_allgather_base_": 3, "send": 2},
            "backward": {"_allgather_base_": 2, "send": 4, "_reduce_scatter_base_": 3},
        }
        assert seen["ulysses"] == {
            "forward": {"_allgather_base_": 3, "alltoall_base_": 8},
            "backward": {"_allgather_base_": 2, "alltoall_base_": 8, "_reduce_scatter_base_": 3},
        }


def test_ranks_with_different_models_refuse_together() -> None:
    what = "names, shapes, dtypes or requires_grad of their parameters"
    said = f"parallelism: the ranks built different models: {what} differ"
    for seen in observations(2):
        assert seen["different_models"].startswith(f"{said}\n  try: build the model from the config alone")
    texts = sorted(seen["one_refuses"] for seen in observations(2))
    assert texts[0].startswith("parallelism.fsdp.wrap=auto would shard Linear as one unit over 2 ranks")
    assert texts[1].startswith(f"{said}, and some rank refused its own\n")


@pytest.mark.parametrize(("size", "name"), [(2, "odd_sequence"), (4, "odd_pipeline")])
def test_a_sequence_that_does_not_divide_is_refused_on_every_rank(size: int, name: str) -> None:
    for seen in observations(size):
        assert seen[name] == (
            "parallelism.enable_sequence_parallel: a sequence of 11 does not divide over parallelism.tp_size=2: 11 % 2 = 1\n"
            "  try: sequences of 10 or 12, or parallelism.enable_sequence_parallel=false"
        )
