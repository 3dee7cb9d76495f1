"""Best first, told apart, and the table on the console."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_parallelism import ConfigurationError
from hydra_parallelism.outcome import DEGREES, Row, Status
from hydra_parallelism.ranking import labels, layout_of, objective_of, one_line, places, rank, short, shorten, table

ONES = dict.fromkeys(DEGREES, 1)


def row(
    job: int,
    loss: float | None = None,
    *,
    status: Status = Status.ok,
    overrides: str = "",
    more: Mapping[str, float] | None = None,
    error: str = "",
    **degrees: int,
) -> Row:
    numbers = ({} if loss is None else {"loss": loss}) | dict(more or {})
    peak = (2**30, (1100 + job) * 2**20) if status is not Status.killed else ()
    return Row(job, f"f{job}", status, ONES | degrees, 8, numbers, 12.345, peak, f"/s/{job}", error, overrides)


ROWS = [
    row(0, status=Status.killed, dp_shard=2, error="rank 1 of 2 on host was killed by SIGKILL, without an exception"),
    row(1, 2.0, dp_shard=4, tp_size=2),
    row(2, math.nan, tp_size=8),
    row(3, 1.25, dp_shard=8),
    row(4, pp_size=8),
    row(5, math.inf, ring_degree=8),
    row(6, 2.0, cfg_parallel=2, ep_size=4),
]


@pytest.mark.parametrize(
    ("maximize", "order", "of_place"),
    [
        (False, [3, 1, 6, 5, 2, 4, 0], [1, 2, 2, 4, None, None, None]),
        (True, [5, 1, 6, 3, 2, 4, 0], [1, 2, 2, 4, None, None, None]),
    ],
)
def test_best_first(maximize: bool, order: list[int], of_place: list[int | None]) -> None:
    ranked = rank(ROWS, "loss", maximize)
    assert [each.job for each in ranked] == order
    assert places(ranked, "loss") == of_place
    assert rank(ROWS, None, maximize) == ranked, "the only number there is"


def test_a_failed_job_has_no_place_whatever_it_returned() -> None:
    rows = [row(0, 0.5, status=Status.failed), row(1, 3.0)]
    assert [each.job for each in rank(rows, None, False)] == [1, 0]
    assert places(rank(rows, None, False), "loss") == [1, None]


@given(st.lists(st.floats(), max_size=8), st.booleans())
def test_nothing_is_lost(losses: list[float], maximize: bool) -> None:
    rows = [row(i, loss) for i, loss in enumerate(losses)]
    ranked = rank(rows, None, maximize)
    assert sorted(each.job for each in ranked) == list(range(len(rows)))
    numbers = [each.numbers["loss"] for each in ranked if not math.isnan(each.numbers["loss"])]
    assert numbers == sorted(numbers, reverse=maximize)


def test_which_number() -> None:
    both = [row(0, 1.0, more={"tokens_per_s": 2.0})]
    assert objective_of(both, "tokens_per_s") == "tokens_per_s"
    assert objective_of([row(0)], None) is None
    assert objective_of([row(0)], "loss") == "loss", "all failed: nothing to object to"
    with pytest.raises(ConfigurationError) as caught:
        rank(both, None, False)
    assert str(caught.value) == (
        "the jobs returned loss, tokens_per_s: which one ranks them?\n  try: hydra.sweeper.objective=loss"
    )
    with pytest.raises(ConfigurationError) as caught:
        rank(both, "token_per_s", False)
    assert str(caught.value) == (
        "hydra.sweeper.objective=token_per_s: the jobs returned loss, tokens_per_s\n"
        "  try: hydra.sweeper.objective=tokens_per_s"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        ({}, "no layout"),
        (ONES, "one process"),
        (ONES | {"dp_shard": 4, "tp_size": 2, "ep_size": 8}, "dp_shard=4 tp_size=2 ep_size=8"),
    ],
)
def test_a_layout_in_short(degrees: dict[str, int], layout: str) -> None:
    assert layout_of(degrees) == layout


def test_rows_of_one_layout_are_told_apart() -> None:
    rows = [
        row(0, overrides="parallelism=fsdp train.lr=0.1 'train.name=a b'", dp_shard=4),
        row(1, overrides="parallelism=fsdp train.lr=0.2 'train.name=a b'", dp_shard=4),
        row(2, overrides="parallelism=fsdp train.lr=0.2", dp_shard=8),
        row(3, overrides="x=1", tp_size=2),
        row(4, overrides="x=1", tp_size=2),
        row(5, overrides="x='", pp_size=2),
        row(6, overrides="y=2", pp_size=2),
        Row(7, "f", Status.failed, overrides="parallelism=fsdp parallelism.tp_size=3"),
        Row(8, "g", Status.failed),
    ]
    assert labels(rows) == [
        "dp_shard=4, train.lr=0.1",
        "dp_shard=4, train.lr=0.2",
        "dp_shard=8",
        "tp_size=2, job 3",
        "tp_size=2, job 4",
        "pp_size=2, x='",
        "pp_size=2, y=2",
        "no layout, parallelism=fsdp parallelism.tp_size=3",
        "no layout",
    ]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (1.25, "1.25"),
        (0.00012345, "0.0001234"),
        (3.14159, "3.142"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (1234.5678, "1,235"),
        (-1234567, "-1,234,567"),
        (1.5e13, "1.5e+13"),
        (1e-9, "1e-09"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_for_people(number: float, text: str) -> None:
    assert short(number) == text


def test_texts_for_one_line() -> None:
    assert one_line("\n  first\tpart\x1b[31m\nsecond") == "first part [31m"
    assert one_line("") == ""
    assert [shorten("dp_shard=4, lr=0.1", width) for width in (18, 13, 4, 3, 0)] == [
        "dp_shard=4, lr=0.1", "dp_sh...r=0.1", "d...", "...", "",
    ]  # fmt: skip


def test_the_table() -> None:
    assert table(ROWS, None, False, 100) == (
        "by loss, lowest first:\n"
        "#  layout                    world  loss  seconds  peak MiB  status\n"
        "1  dp_shard=8                    8  1.25    12.35     1,103  ok\n"
        "2  dp_shard=4 tp_size=2          8     2    12.35     1,101  ok\n"
        "2  cfg_parallel=2 ep_size=4      8     2    12.35     1,106  ok\n"
        "4  ring_degree=8                 8   inf    12.35     1,105  ok\n"
        "-  tp_size=8                     8   nan    12.35     1,102  ok\n"
        "-  pp_size=8                     8     -    12.35     1,104  ok\n"
        "-  dp_shard=2                    8     -    12.35         -  killed\n"
        "   rank 1 of 2 on host was killed by SIGKILL, without an exception"
    )


def test_the_other_numbers_and_an_error_that_fits() -> None:
    rows = [row(0, 2.0, more={"tokens_per_s": 12345.6}), row(1, status=Status.failed, error="ValueError: x\n", tp_size=2)]
    assert table(rows, "tokens_per_s", True, 100) == (
        "by tokens_per_s, highest first:\n"
        "#  layout       world  tokens_per_s  seconds  peak MiB  loss  status\n"
        "1  one process      8        12,346    12.35     1,100     2  ok\n"
        "-  tp_size=2        8             -    12.35     1,101     -  failed: ValueError: x"
    )


def test_a_narrow_table() -> None:
    rows = [
        row(0, 2.0, more={"x": 1.0}, overrides="train.lr=0.1", dp_replicate=2, dp_shard=2, tp_size=2),
        row(1, 3.0, more={"x": 1.0}, overrides="train.lr=0.2", dp_replicate=2, dp_shard=2, tp_size=2),
    ]
    assert table(rows, "loss", False, 60) == (
        "by loss, lowest first:\n"
        "#  layout                       world  loss  seconds  status\n"
        "1  dp_replicate...train.lr=0.1      8     2    12.35  ok\n"
        "2  dp_replicate...train.lr=0.2      8     3    12.35  ok\n"
        "no room for peak MiB, x: see results.csv"
    )


def test_a_sweep_of_failures_and_one_of_nothing() -> None:
    assert table([Row(0, "a", Status.failed, error="ValueError: x")], None, False, 80) == (
        "no job returned a number:\n"
        "#  layout     world  seconds  status\n"
        "-  no layout      -        -  failed: ValueError: x"
    )  # fmt: skip
    assert table([], "loss", False, 80) == "no jobs"


@pytest.mark.parametrize("width", [0, 1, 2, 10, 25, 40, 55, 80])
def test_no_line_is_longer_than_it_may_be(width: int) -> None:
    rows = [*ROWS, row(9, 5.0, more={f"number {i}": i for i in range(9)}, overrides="x" * 90, dp_shard=8)]
    assert max(map(len, table(rows, "loss", False, width).splitlines()), default=0) <= width
