"""The picture of a sweep. What it looks like is for eyes; here: what it holds, and that it is always the same."""

import math
import struct
import sys
from pathlib import Path

import pytest

from hydra_parallelism import ConfigurationError
from hydra_parallelism.outcome import DEGREES, Row, Status
from hydra_parallelism.pictures import ABSENT, draw
from processes import run

ONES = dict.fromkeys(DEGREES, 1)


def rows(count: int) -> list[Row]:
    return [
        Row(i, f"f{i}", Status.ok, ONES | {"dp_shard": i + 2}, 8, {"loss": 3.0 - i / 8}, 1.0, (2**30, 2**30 + i))
        for i in range(count)
    ]


FAILED = Row(
    90, "x", Status.out_of_memory, ONES | {"tp_size": 8}, 8, error="torch.OutOfMemoryError: <b> & \N{EURO SIGN} $x$\nmore"
)
ODD = [
    Row(91, "y", Status.ok, ONES, 1, {"loss": math.nan}),
    Row(92, "z", Status.ok, ONES | {"pp_size": 2}, 1, {"loss": -math.inf}),
    Row(93, "w", Status.ok, ONES | {"pp_size": 4}, 1, {}),
    Row(94, "v", Status.killed, {}),
]


def texts(folder: Path) -> str:
    return (folder / "results.svg").read_text(encoding="utf-8")


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_both_files_and_what_they_say(tmp_path: Path) -> None:
    paths = draw([*rows(3), FAILED, *ODD], tmp_path / "new", None, False, "losses of $5 & more")
    assert paths == [tmp_path / "new/results.png", tmp_path / "new/results.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["results.png", "results.svg"]
    assert size_of_png(paths[0])[0] == 1210
    for text in (
        "losses of $5 &amp; more", "loss (lower is better)", "peak memory, MiB", "dp_shard=2", "dp_shard=4", ">2.75<",
        "-inf  best", ">nan<", ">no number<", ">1,024<", "tp_size=8", "no layout", "\N{MULTIPLICATION SIGN} killed",
        "\N{MULTIPLICATION SIGN} out of memory: torch.OutOfMemoryError: &lt;b&gt; &amp; \N{EURO SIGN} $x$<",
    ):  # fmt: skip
        assert text in texts(tmp_path / "new"), text


def test_the_other_direction(tmp_path: Path) -> None:
    draw(rows(3), tmp_path, "loss", True)
    assert "3  best" in texts(tmp_path)
    assert "loss (higher is better)" in texts(tmp_path)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    already = "matplotlib.pyplot" in sys.modules  # other libraries' tests import it
    draw([*rows(3), FAILED, *ODD], tmp_path / "a", None, False)
    mine = {"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "black"}
    with matplotlib.rc_context(mine):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
        draw([*rows(3), FAILED, *ODD], tmp_path / "b", None, False)
        assert {name: matplotlib.rcParams[name] for name in mine} == mine, "the user's settings are back"
    for name in ("results.png", "results.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert ("matplotlib.pyplot" in sys.modules) == already


@pytest.mark.parametrize(
    "odd",
    [
        [],
        [FAILED],
        ODD[:1],
        ODD[1:2],
        [Row(0, "a", Status.ok, ONES, 1, {"loss": value}) for value in (1e308, -1e308, 1e-320)],
        [Row(0, "a", Status.ok, ONES, 1, {"loss": value}) for value in (-1.0, -2.0)],
        [Row(0, "a", Status.ok, ONES, 1, {"loss": 0.0}, peak_memory=(0,))],
        [Row(0, "a", Status.ok, ONES, 1, {"\N{CJK UNIFIED IDEOGRAPH-65E5}": 1.0}, overrides="$\\frac{ x")],
    ],
)
def test_odd_sweeps(odd: list[Row], tmp_path: Path) -> None:
    """Warnings are errors here: an axis without extent, a glyph that the font lacks."""
    paths = draw(odd, tmp_path, None, False)
    assert paths is not None
    assert all(path.stat().st_size > 1000 for path in paths)


def test_a_picture_grows_up_to_a_point(tmp_path: Path) -> None:
    draw(rows(40), tmp_path, None, False)
    assert 1400 < (highest := size_of_png(tmp_path / "results.png")[1]) < 1700
    draw(rows(210), tmp_path, None, False)
    assert size_of_png(tmp_path / "results.png")[1] == highest
    assert "loss (lower is better) - 40 of 210 jobs" in texts(tmp_path)


def test_which_number_must_be_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the jobs returned a, b: which one ranks them"):
        draw([Row(0, "a", Status.ok, ONES, 1, {"a": 1.0, "b": 2.0})], tmp_path, None, False)
    assert list(tmp_path.iterdir()) == []


WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from hydra_parallelism.outcome import Row, Status
from hydra_parallelism.pictures import ABSENT, draw

print(draw([Row(0, "a", Status.ok, numbers={"loss": 1.0})], ".", None, False), ABSENT)
"""


@pytest.mark.processes
def test_without_matplotlib_there_is_no_picture(tmp_path: Path) -> None:
    outcome = run([sys.executable, "-W", "error", "-c", WITHOUT], tmp_path)
    assert (outcome.code, outcome.text) == (0, f"None {ABSENT}\n")
    assert list(tmp_path.iterdir()) == []
    assert ABSENT.endswith("pip install 'hydra-parallelism[plots]'")
