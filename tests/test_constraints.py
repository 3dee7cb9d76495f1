"""What a model allows of a layout: each rule, its reason, and the text of every refusal of the constraints themselves."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.constraints import read_constraints
from hydra_parallelism.layouts import ModelConstraints, enumerate_layouts, feasible, judge

FACTORS = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp")
quick = settings(max_examples=120, deadline=None, derandomize=True)


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "constraints", "reasons"),
    [
        (Topology(tp=4), {"num_heads": 6}, ["num_heads=6 does not divide by tp_size=4"]),
        (Topology(tp=2, ulysses=4), {"num_heads": 56}, []),
        (Topology(tp=4, ulysses=4), {"num_heads": 56}, ["num_heads=56 / tp_size=4 = 14 does not divide by ulysses_degree=4"]),
        (Topology(ulysses=4), {"num_heads": 6}, ["num_heads=6 does not divide by ulysses_degree=4"]),
        (Topology(tp=4), {"num_heads": 2}, ["num_heads=2 does not divide by tp_size=4"]),
        (Topology(tp=4), {"num_kv_heads": 2}, []),
        (Topology(tp=4, ulysses=8), {"num_kv_heads": 2}, []),
        (Topology(tp=2, ulysses=4), {"num_kv_heads": 4}, []),
        (Topology(tp=2, ulysses=2), {"num_kv_heads": 8}, []),
        (Topology(tp=4), {"num_kv_heads": 6}, ["num_kv_heads=6 does not divide by tp_size=4"]),
        (Topology(tp=8), {"num_kv_heads": 3}, ["num_kv_heads=3 does not divide by tp_size=8, nor the other way round"]),
        (
            Topology(tp=2, ulysses=4),
            {"num_kv_heads": 6},
            ["num_kv_heads=6 / tp_size=2 = 3 does not divide by ulysses_degree=4, nor the other way round"],
        ),
        (Topology(ulysses=4), {"seq_len": 12}, []),
        (Topology(ulysses=4), {"seq_len": 10}, ["seq_len=10 does not divide by ulysses_degree=4"]),
        (Topology(ring=2, ulysses=2), {"seq_len": 12}, []),
        (
            Topology(ring=2, ulysses=3),
            {"seq_len": 18},
            [
                "seq_len=18 does not divide by pieces=2 * ring_degree=2 * ulysses_degree=3 = 12 "
                "(a balanced ring gives each rank two pieces)"
            ],
        ),
        (Topology(ring=2), {"seq_len": 12}, []),
        (Topology(tp=8), {"seq_len": 12}, []),
        (Topology(dp_shard=8, ep=8), {"num_experts": 12}, ["num_experts=12 does not divide by ep_size=8"]),
        (Topology(pp=4), {"num_layers": 3}, ["num_layers=3 is less than pp_size=4"]),
        (Topology(pp=4), {"num_layers": 6}, ["num_layers=6 does not divide by pp_size=4"]),
        (Topology(pp=4), {"num_layers": 4}, []),
        (Topology(dp_shard=8), {"global_batch": 12}, ["global_batch=12 does not divide by dp_shard=8"]),
        (
            Topology(dp_replicate=4, dp_shard=2),
            {"global_batch": 12},
            ["global_batch=12 does not divide by dp_replicate=4 * dp_shard=2 = 8"],
        ),
        (Topology(tp=8, pp=8), None, []),
        (
            Topology(tp=4, pp=3),
            {"num_heads": 6, "num_layers": 2},
            ["num_heads=6 does not divide by tp_size=4", "num_layers=2 is less than pp_size=3"],
        ),
    ],
)  # fmt: skip
def test_each_violated_constraint_has_one_reason(layout: Topology, constraints: Any, reasons: list[str]) -> None:
    assert judge(layout, constraints) == reasons
    assert judge(layout, ModelConstraints(**(constraints or {}))) == reasons
    assert judge(layout, OmegaConf.create(constraints or {})) == reasons


def test_sequence_parallelism_splits_the_sequence_over_tp_too() -> None:
    layout = Topology(ulysses=2, tp=4)
    assert judge(layout, {"seq_len": 12}, sequence_parallel=True) == [
        "seq_len=12 does not divide by ulysses_degree=2 * tp_size=4 = 8"
    ]
    assert judge(layout, {"seq_len": 16}, sequence_parallel=True) == []


@quick
@given(
    st.builds(Topology, *[st.integers(1, 6)] * 3, st.integers(1, 2), *[st.integers(1, 6)] * 4),
    st.fixed_dictionaries({f.name: st.integers(1, 48) for f in dataclasses.fields(ModelConstraints)}),
    st.booleans(),
)
def test_a_reason_is_given_exactly_when_a_rule_is_broken(at: Topology, model: dict[str, int], split: bool) -> None:
    def shares(heads: int, ranks: int) -> int | None:
        """Heads on each rank: an equal part, or one that several ranks hold alike."""
        return heads // ranks if heads % ranks == 0 else 1 if ranks % heads == 0 else None

    kv = shares(model["num_kv_heads"], at.tp)
    broken = {
        "num_heads": model["num_heads"] % (at.tp * at.ulysses) != 0,
        "num_kv_heads": kv is None or shares(kv, at.ulysses) is None,
        "seq_len": model["seq_len"] % (at.ring * math.lcm(at.ulysses * (at.tp if split else 1), 2 if at.ring > 1 else 1)) != 0,
        "num_experts": model["num_experts"] % at.ep != 0,
        "num_layers": model["num_layers"] % at.pp != 0,
        "global_batch": model["global_batch"] % (at.dp_replicate * at.dp_shard) != 0,
    }
    reasons = judge(at, model, sequence_parallel=split)
    assert [reason.partition("=")[0] for reason in reasons] == [name for name, wrong in broken.items() if wrong]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", "???x"])
def test_a_constraint_is_a_whole_number_of_at_least_one(value: Any) -> None:
    expected = (
        "hydra.sweeper.constraints is not valid:\n"
        f"  hydra.sweeper.constraints.num_heads={value}: must be a whole number of at least 1, or null to check nothing"
    )
    for call in (
        lambda: judge(Topology(), {"num_heads": value}),
        lambda: judge(Topology(), ModelConstraints(num_heads=value)),
        lambda: enumerate_layouts(8, ["tp"], constraints={"num_heads": value}),
        lambda: feasible({}, 8, {"num_heads": value}),
    ):
        assert _refusal(call) == expected
    assert _refusal(lambda: judge(Topology(), {"num_heads": value}, key="model")) == expected.replace(
        "hydra.sweeper.constraints", "model"
    )


def test_an_unknown_constraint_is_refused_with_the_nearest() -> None:
    assert _refusal(lambda: judge(Topology(), {"n_heads": 8, "num_layers": 0})) == (
        "hydra.sweeper.constraints is not valid:\n"
        "  hydra.sweeper.constraints.n_heads: no such key; did you mean 'num_heads'?\n"
        "  hydra.sweeper.constraints.num_layers=0: must be a whole number of at least 1, or null to check nothing"
    )
    assert (
        _refusal(lambda: judge(Topology(), [8])) == "hydra.sweeper.constraints must be a mapping or ModelConstraints, not list"
    )
    text = _refusal(lambda: judge(Topology(), OmegaConf.create({"num_heads": "${nowhere}"})))
    assert text.startswith("hydra.sweeper.constraints cannot be read: Interpolation key 'nowhere' not found")


def test_constraints_are_a_structured_config() -> None:
    node = OmegaConf.structured(ModelConstraints)
    assert read_constraints(node) == ModelConstraints()
    node.num_heads = 32
    assert read_constraints(node) == ModelConstraints(num_heads=32)
    with pytest.raises(ValidationError):
        node.num_heads = "many"
