"""The file that keeps what each job came to."""

import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_parallelism import ConfigurationError
from hydra_parallelism.outcome import COLUMNS, DEGREES, Row, Status
from hydra_parallelism.results import ResultsFile, write_whole
from processes import run, start

HEADER = (
    "job,status,pp_size,dp_replicate,dp_shard,cfg_parallel,ring_degree,ulysses_degree,tp_size,ep_size,world_size,"
    "{}seconds,peak_memory_mib,peak_memory_mib_per_rank,folder,error,overrides,fingerprint"
)
DENSE = dict.fromkeys(DEGREES, 1) | {"dp_shard": 4, "tp_size": 2}
ROW = Row(
    job=3,
    fingerprint="a1",
    status=Status.ok,
    degrees=DENSE,
    world=8,
    numbers={"loss": 0.1},
    seconds=12.5,
    peak_memory=(1048576, 1572864),
    folder="/sweep/3",
    overrides="parallelism.tp_size=2 'name=a b'",
)


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert ResultsFile(tmp_path / "not there").read() == []


def test_a_row_as_it_is_written(tmp_path: Path) -> None:
    ResultsFile(tmp_path / "new" / "sweep").put(ROW)
    assert (tmp_path / "new/sweep/results.csv").read_text() == (
        f"{HEADER.format('loss,')}\n"
        "3,ok,1,1,4,1,1,1,2,1,8,0.1,12.5,1.5,1 1.5,/sweep/3,,parallelism.tp_size=2 'name=a b',a1\n"
    )  # fmt: skip
    assert ResultsFile(tmp_path / "new" / "sweep").read() == [ROW]


def test_a_job_that_could_not_be_laid_out(tmp_path: Path) -> None:
    row = Row(0, "f", Status.failed, error='does "not", fit\nat all')
    ResultsFile(tmp_path).put(row)
    assert (tmp_path / "results.csv").read_text() == (
        f'{HEADER.format("")}\n0,failed,,,,,,,,,,,,,,"does ""not"", fit\nat all",,f\n'
    )
    assert ResultsFile(tmp_path).read() == [row]


def test_a_job_that_is_run_again_replaces_its_row(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    file.put(Row(0, "a", Status.failed, error="ValueError: x"))
    file.put(Row(1, "b", Status.ok, numbers={"loss": 2.0}))
    file.put(Row(5, "a", Status.ok, numbers={"loss": 1.0, "accuracy": 0.5}))
    assert file.read() == [
        Row(5, "a", Status.ok, numbers={"loss": 1.0, "accuracy": 0.5}),
        Row(1, "b", Status.ok, numbers={"loss": 2.0}),
    ]
    assert (tmp_path / "results.csv").read_text().splitlines()[0] == HEADER.format("loss,accuracy,")


TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)
NAME = TEXT.filter(lambda name: name and name not in COLUMNS)
ROWS = st.builds(
    Row,
    job=st.integers(0, 10**6),
    fingerprint=TEXT,
    status=st.sampled_from(Status),
    degrees=st.dictionaries(st.sampled_from(DEGREES), st.integers(1, 4096)),
    world=st.none() | st.integers(1, 10**6),
    numbers=st.dictionaries(NAME, st.floats(allow_nan=False), max_size=3),
    seconds=st.none() | st.floats(0, 1e9),
    peak_memory=st.lists(st.integers(0, 2**52), max_size=4).map(tuple),
    folder=TEXT,
    error=TEXT | st.just("a\r\nb\rc\n,\"'\ufeff\u2028;"),
    overrides=TEXT,
)


@given(st.lists(ROWS, min_size=1, max_size=4, unique_by=lambda row: row.fingerprint))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    file = ResultsFile(tmp_path_factory.mktemp("sweep"))
    for row in rows:
        file.put(row)
    assert file.read() == rows


def test_odd_cells(tmp_path: Path) -> None:
    """NaN, an error of a megabyte, a byte that is no UTF-8 in a path, and a NUL, which Python 3.10 does not read."""
    ResultsFile(tmp_path).put(Row(0, "a", Status.ok, numbers={"x": math.nan}, error="e" * 10**6, folder="/\udcff/a\0b"))
    (row,) = ResultsFile(tmp_path).read()
    assert math.isnan(row.numbers["x"])
    assert len(row.error) == 10**6
    assert row.folder == "/\\udcff/a\\0b"


def test_a_spreadsheet_may_have_saved_it(tmp_path: Path) -> None:
    ResultsFile(tmp_path).put(ROW)
    path = tmp_path / "results.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert ResultsFile(tmp_path).read() == [ROW]


@pytest.mark.parametrize("name", ["seconds", "tp_size", ""])
def test_a_number_cannot_be_named_as_a_column(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the numbers of a job cannot be written:\n  .*(already|must be text)"):
        ResultsFile(tmp_path).put(Row(0, "a", Status.ok, numbers={name: 1.0}))
    assert list(tmp_path.iterdir()) == []


GOOD = "0,ok,1,1,1,1,1,1,1,1,1,0.5,1.0,,,/f,,o,a"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its columns are none; must be job, status, pp_size"),
        ("job,loss\n1,2\n", "its columns are job, loss; must be job, status, pp_size"),
        (f"{HEADER.format('loss,loss,')}\n", "its columns are job, status"),
        (f"{HEADER.format('loss,tp_size,')}\n", "its columns are job, status"),
        (f"{HEADER.format('loss,')}\n{GOOD}\n0,ok,1\n", "line 3 has 3 cells, not 19"),
        (f"{HEADER.format('loss,')}\n{GOOD}\n\n", "line 3 has 0 cells, not 19"),
        (f"{HEADER.format('loss,')}\n{GOOD.replace('0,ok', 'x,ok', 1)}\n", "line 2: job=x is no whole number"),
        (f"{HEADER.format('loss,')}\n{GOOD.replace('0,ok', ',ok', 1)}\n", "line 2: job is empty"),
        (f"{HEADER.format('loss,')}\n{GOOD.replace('ok', 'fine')}\n", "line 2: 'fine' is not a valid Status"),
        (f"{HEADER.format('loss,')}\n{GOOD.replace('0.5', 'half')}\n", "line 2: loss=half is no number"),
        (f"{HEADER.format('loss,')}\n{GOOD.replace('/f', chr(34))}\n", "unexpected end of data"),
        ("\udcff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_file_that_is_not_ours(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for attempt in (ResultsFile(tmp_path).read, lambda: ResultsFile(tmp_path).put(ROW)):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        assert str(caught.value).startswith(f"{path} is not the results of a sweep: {why}")
        assert str(caught.value).endswith("\n  try: mend it, or move it away")
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape"), "left as it was"


def test_threads_share_a_file(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path)
    threads = [
        threading.Thread(target=lambda t=t: [file.put(Row(i, f"{t}/{i}", Status.ok)) for i in range(10)]) for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.fingerprint for row in file.read()} == {f"{t}/{i}" for t in range(4) for i in range(10)}


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", b"old")

    def refuse(part: Path, path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_whole(tmp_path / "a", b"new and longer")
    assert (tmp_path / "a").read_bytes() == b"old"


WRITER = """
import itertools, sys
from hydra_parallelism.outcome import Row, Status
from hydra_parallelism.results import ResultsFile

file = ResultsFile(sys.argv[1])
for i in itertools.count():
    file.put(Row(i, str(i), Status.ok, numbers={"loss": float(i)}, error="x" * 5000))
    print(i, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011])
def test_a_killed_sweep_keeps_its_rows(delay: float, tmp_path: Path) -> None:
    """Whoever looks while it runs sees a whole file, too: between two looks there are hundreds of moments to be killed in."""
    process = start([sys.executable, "-c", WRITER, tmp_path], tmp_path)
    seen, until = 0, time.monotonic() + 60
    try:
        while seen < 40 and time.monotonic() < until:
            rows = ResultsFile(tmp_path).read()
            assert [row.job for row in rows] == list(range(len(rows)))
            assert len(rows) >= seen
            seen = len(rows)
        time.sleep(delay)
    finally:
        process.kill()
        text, _ = process.communicate(timeout=20)
    said = int(text.split()[-1])
    rows = ResultsFile(tmp_path).read()
    assert [row.job for row in rows] == list(range(len(rows)))
    assert len(rows) in (said + 1, said + 2), "every row that was put, and perhaps the one in hand"
    assert len(rows) >= 40
    ResultsFile(tmp_path).put(ROW)
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]


@pytest.mark.processes
def test_results_load_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from hydra_parallelism import outcome, pictures, progress, ranking, results\n"
        "print(*sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    outcome = run([sys.executable, "-W", "error", "-c", code], tmp_path)
    assert (outcome.code, outcome.text) == (0, "\n")


def test_a_row_is_plain_data() -> None:
    assert isinstance(ROW.degrees, Mapping)
    with pytest.raises(AttributeError):
        ROW.job = 1  # type: ignore[misc]
