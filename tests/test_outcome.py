"""What a job came to: its status, told from its error alone, and the numbers that its task returned."""

import math
import signal
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
from omegaconf import OmegaConf

from hydra_parallelism import ConfigurationError, LaunchError
from hydra_parallelism.failures import QUITTER, Failure, format_error, tell
from hydra_parallelism.launch import Interrupted, WorkersFailed
from hydra_parallelism.outcome import Status, numbers_of, status_of

# --- status


def failed_on_a_rank(error: BaseException) -> LaunchError:
    """As the launcher tells it: the account of the rank, then who and where."""
    try:
        raise error
    except BaseException as caught:
        cause = Failure(1, 1, format_error(caught), type(caught).__name__)
    return LaunchError(tell(cause, 2, {"dp_shard": 1}, None))


def ended(exitcode: int, kind: str = "", tail: str = "") -> Failure:
    return Failure(1, exitcode, kind=kind, tail=tail)


def torch_error(name: str, message: str) -> BaseException:
    import torch

    error: BaseException = getattr(torch, name)(message)
    return error


def test_no_error_is_ok() -> None:
    assert status_of(None) is Status.ok


@pytest.mark.parametrize("wrap", [lambda error: error, failed_on_a_rank])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("boom"), Status.failed),
        (ConfigurationError("parallelism does not fit the world:\n  x"), Status.failed),
        (ValueError("it says OutOfMemoryError: somewhere"), Status.failed),
        (MemoryError(), Status.out_of_memory),
        (MemoryError("no room"), Status.out_of_memory),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), Status.out_of_memory),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"), Status.out_of_memory),
        (KeyboardInterrupt(), Status.interrupted),
        (SystemExit(3), Status.killed),
    ],
)
def test_the_type_tells(error: BaseException, status: Status, wrap: Any) -> None:
    assert status_of(wrap(error)) is status


@pytest.mark.parametrize("wrap", [lambda error: error, failed_on_a_rank])
def test_torchs_own_error(wrap: Any) -> None:
    assert (
        status_of(wrap(torch_error("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"))) is Status.out_of_memory
    )


@pytest.mark.parametrize("wrap", [lambda error: error, failed_on_a_rank])
def test_a_real_array_that_is_too_large(wrap: Any) -> None:
    with pytest.raises(MemoryError) as caught:
        numpy.empty(2**59)
    assert status_of(wrap(caught.value)) is Status.out_of_memory


def raise_after(memory: BaseException, how: str) -> None:
    try:
        raise memory
    except BaseException as error:
        if how == "from":
            raise RuntimeError("training failed") from error
        if how == "none":
            raise RuntimeError("tried a smaller batch in vain") from None
        raise RuntimeError("while handling")  # noqa: B904 - the context is what is tested


@pytest.mark.parametrize("wrap", [lambda error: error, failed_on_a_rank])
@pytest.mark.parametrize(
    ("how", "status"), [("from", Status.out_of_memory), ("in", Status.out_of_memory), ("none", Status.failed)]
)
def test_the_chain_counts(how: str, status: Status, wrap: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise_after(MemoryError("x"), how)
    assert status_of(wrap(caught.value)) is status


def test_a_chain_may_be_a_circle() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert status_of(first) is Status.failed


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups")
@pytest.mark.parametrize("wrap", [lambda error: error, failed_on_a_rank])
def test_one_of_a_group(wrap: Any) -> None:
    group = ExceptionGroup("two", [ValueError("x"), MemoryError("y")])  # noqa: F821
    assert status_of(wrap(group)) is Status.out_of_memory


@pytest.mark.parametrize(
    "cause",
    [
        ended(-signal.SIGKILL),
        ended(-signal.SIGSEGV, tail="MemoryError: printed before it died"),
        ended(3),
        ended(1, QUITTER),
        ended(-64),
    ],
)
def test_a_rank_without_an_account_was_killed(cause: Failure, tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_text("at work\n")
    assert status_of(LaunchError(tell(cause, 2, {"dp_shard": 1}, log))) is Status.killed
    assert status_of(WorkersFailed("rank 1 failed", cause)) is Status.killed


def test_the_failure_of_a_rank_knows_its_account() -> None:
    cause = Failure(1, 1, "Traceback:\ntorch.OutOfMemoryError: CUDA out of memory", "OutOfMemoryError")
    assert status_of(WorkersFailed("rank 1 failed", cause)) is Status.out_of_memory
    assert status_of(WorkersFailed("rank 1 failed", Failure(1, 1, "ValueError: x", "ValueError"))) is Status.failed


def test_a_sweep_that_was_stopped() -> None:
    assert status_of(Interrupted(signal.SIGTERM)) is Status.interrupted
    assert status_of(LaunchError("not started: the sweep was interrupted")) is Status.interrupted


def test_the_text_alone_is_enough() -> None:
    assert status_of(None, "ValueError: x") is Status.failed
    assert status_of(None, "torch.OutOfMemoryError: x") is Status.out_of_memory


def test_a_status_reads_well() -> None:
    assert (f"{Status.out_of_memory}", Status.out_of_memory.words) == ("out_of_memory", "out of memory")


# --- numbers


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, {}),
        (1.5, {"objective": 1.5}),
        (3, {"objective": 3.0}),
        (-math.inf, {"objective": -math.inf}),
        (Fraction(1, 4), {"objective": 0.25}),
        (numpy.float32(0.5), {"objective": 0.5}),
        (numpy.int64(7), {"objective": 7.0}),
        (numpy.array(2.5), {"objective": 2.5}),
        ({}, {}),
        ({"loss": 2, "tokens_per_s": numpy.float32(0.5)}, {"loss": 2.0, "tokens_per_s": 0.5}),
        (OmegaConf.create({"loss": 2.0}), {"loss": 2.0}),
    ],
)
def test_numbers(value: Any, numbers: dict[str, float]) -> None:
    found = numbers_of(value)
    assert list(found.items()) == list(numbers.items())
    assert all(type(number) is float for number in found.values())


def test_nan_is_a_number() -> None:
    assert math.isnan(numbers_of({"loss": math.nan})["loss"])


def test_a_tensor_of_no_dimension_is_a_number() -> None:
    import torch

    assert numbers_of(torch.tensor(0.5)) == {"objective": 0.5}
    assert numbers_of({"n": torch.tensor(3)}) == {"n": 3.0}
    with pytest.raises(ConfigurationError, match=r"the task returns tensor\(\[1\.\]\) \(Tensor\), which is no number"):
        numbers_of(torch.ones(1))
    with pytest.raises(ConfigurationError, match=r"tensor\(True\) \(Tensor\)"):
        numbers_of(torch.tensor(True))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "True (bool)"),
        (numpy.bool_(True), "np.True_ (bool)"),
        ("1.5", "'1.5' (str)"),
        ([1.0], "[1.0] (list)"),
        (1j, "1j (complex)"),
        (Decimal(1), "Decimal('1') (Decimal)"),
        (10**400, f"1{'0' * 56}... (int)"),
    ],
)
def test_what_is_no_number(value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        numbers_of(value)
    assert str(caught.value) == (
        f"the task returns {said}, which is no number\n"
        "  try: return a number, or a mapping of names to numbers, or nothing"
    )  # fmt: skip


def test_every_entry_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        numbers_of({"loss": 1.0, "done": True, "per_layer": {"a": 1.0}, 3: 1.0, "": 2.0, "seconds": 4.0, "best": None})
    assert str(caught.value) == (
        "the task returns a mapping that is not of names to numbers:\n"
        "  done: True (bool), which is no number\n"
        "  per_layer: {'a': 1.0} (dict), which is no number\n"
        "  best: None (NoneType), which is no number\n"
        "  3 (int) cannot name a number: must be text\n"
        "  '' (str) cannot name a number: must be text\n"
        "  seconds: a column of results.csv has this name already; try: task_seconds"
    )
