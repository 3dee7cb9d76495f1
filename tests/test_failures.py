"""Which of many failures is the cause, and what is said of it."""

import json
import signal
from pathlib import Path

import pytest

from hydra_parallelism import ConfigurationError
from hydra_parallelism.failures import FOLLOWER, Failure, find_cause, format_error, tell, write_error_file

ECHO = "torch.distributed.DistBackendError: Connection closed by peer"


def test_the_earliest_account_that_is_no_echo() -> None:
    failures = [
        Failure(0, 1, "RuntimeError: gloo/transport/tcp: Connection closed by peer", "RuntimeError", 1.0),
        Failure(1, 1, "ValueError: b", "ValueError", 3.0),
        Failure(2, 1, "ValueError: a", "ValueError", 2.0),
        Failure(3, -signal.SIGTERM),
    ]
    assert find_cause(failures).rank == 2


@pytest.mark.parametrize("exitcode", [3, -signal.SIGKILL, -signal.SIGSEGV])
def test_a_rank_that_died_silently_comes_before_echoes(exitcode: int) -> None:
    failures = [Failure(0, 1, ECHO, "DistBackendError", 1.0), Failure(1, exitcode), Failure(2, -signal.SIGTERM)]
    assert find_cause(failures).rank == 1


def test_a_refusal_comes_before_those_who_left_because_of_it() -> None:
    left = {"text": "parallelism does not fit", "kind": FOLLOWER, "moment": 1.0}
    failures = [Failure(0, 1, **left), Failure(1, 1, "parallelism does not fit", "ConfigurationError", 5.0)]
    assert find_cause(failures).rank == 1
    assert find_cause([Failure(0, 1, **left), Failure(1, 3)]).rank == 1


def test_sys_exit_with_a_message_is_a_death_like_others() -> None:
    assert find_cause([Failure(0, 1, ECHO, "DistBackendError", 1.0), Failure(1, 1)]).rank == 1


def test_only_echoes_are_better_than_nothing() -> None:
    failures = [Failure(0, -signal.SIGTERM), Failure(1, 1, ECHO, "DistBackendError", 1.0)]
    assert find_cause(failures).rank == 1


def test_who_and_where_come_last(tmp_path: Path) -> None:
    log = tmp_path / "2.log"
    log.touch()
    text = tell(Failure(2, 1, "ValueError: x", "ValueError", 0.0), 4, {"dp_shard": 1}, log)
    assert text.splitlines()[0] == "ValueError: x"
    assert text.splitlines()[1].startswith("rank 2 of 4 on ")
    assert text.splitlines()[1].endswith(" (dp_shard=1) failed")
    assert text.splitlines()[2] == f"  its log: {log}"


def test_an_account_is_written_once_in_torchs_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    assert not write_error_file(ValueError("nobody reads it"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert write_error_file(ValueError("first"))
    assert write_error_file(ValueError("second"))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: first"
    assert int(message["extraInfo"]["timestamp"]) > 0
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: first")


def run_job() -> None:
    """Stands for Hydra's function of that name: frames up to it are not shown."""
    raise_from_task()


def raise_from_task() -> None:
    raise ValueError("mine")


def test_a_traceback_starts_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        run_job()
    text = format_error(caught.value)
    assert "in raise_from_task" in text
    assert "in run_job" not in text
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert "in run_job" in format_error(caught.value)


def test_a_refusal_needs_no_traceback() -> None:
    assert format_error(ConfigurationError("say this")) == "say this"
