"""The picture of a sweep: ``results.png`` and ``results.svg``, one bar for each job, best on top.

One look tells the winner (the strong bar) and the failures (a hatched band with a cross). A second, narrow panel shows the peak
memory of the ranks. Drawing needs matplotlib, which is optional; nothing here touches ``pyplot``, so a task's own figures and
settings stay as they are. The same rows give the same bytes.
"""

import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .outcome import Row, Status
from .ranking import labels, objective_of, one_line, peak_mib, rank, short, shorten
from .results import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ABSENT", "draw"]

ABSENT = "no picture of the results: matplotlib is not installed\n  try: pip install 'hydra-parallelism[plots]'"
"""What to say when :func:`draw` returns ``None``."""

_WINNER, _MUTED, _FAILED, _INK = "#1b6ca8", "#c3cdd6", "#c0392b", "#333333"
_INCHES_PER_ROW = 0.32
_LONGEST_LABEL = 56
_LONGEST_ERROR = 64
_MOST_ROWS = 40  # more cannot be read, and take long to draw
_SETTINGS: Any = {
    "svg.hashsalt": "hydra-parallelism",  # else the ids in the file are random
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a label may hold a dollar sign
    "font.size": 9.0,
}


def draw(
    rows: Sequence[Row], folder: str | os.PathLike[str], objective: str | None, maximize: bool, title: str = ""
) -> list[Path] | None:
    """Write ``results.png`` and ``results.svg``.

    Args:
        rows: The results, in any order.
        folder: Where to write.
        objective: The number to draw, see :func:`~hydra_parallelism.ranking.objective_of`.
        maximize: Whether more of it is better.
        title: Stands above the picture.

    Returns:
        The files; ``None`` when matplotlib is not installed, see :data:`ABSENT`.

    Raises:
        ConfigurationError: There is no telling which number to draw.
    """
    name = objective_of(rows, objective)
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        return None
    paths = [Path(folder) / f"results.{kind}" for kind in ("png", "svg")]
    ranked = _choose(rank(rows, name, maximize))
    of_all = f" - {_MOST_ROWS} of {len(rows)} jobs" if len(rows) > _MOST_ROWS else ""
    direction = "higher" if maximize else "lower"
    label = f"{one_line(name)} ({direction} is better){of_all}" if name else f"no number returned{of_all}"
    with _settings():
        layout = ConstrainedLayoutEngine(w_pad=0.12)  # a viewer's font may be wider than ours
        figure = Figure(figsize=(11, 1.4 + _INCHES_PER_ROW * max(len(ranked), 3)), dpi=110, layout=layout)
        _compose(figure, ranked, name, label)
        if title:
            figure.suptitle(shorten(one_line(title), 100), fontsize=11, fontweight="bold", color=_INK)
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # laid out by now; a layout engine, even "none", has each file drawn twice
        for path in paths:
            data = io.BytesIO()
            figure.savefig(data, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
            write_whole(path, data.getvalue())
    return paths


def _choose(ranked: list[Row]) -> list[Row]:
    """The best, and of the failures, which rank last, at most a quarter of the picture."""
    if len(ranked) <= _MOST_ROWS:
        return ranked
    good = [row for row in ranked if row.status is Status.ok]
    failed = [row for row in ranked if row.status is not Status.ok][: max(_MOST_ROWS // 4, _MOST_ROWS - len(good))]
    return [*good[: _MOST_ROWS - len(failed)], *failed]


@contextmanager
def _settings() -> Iterator[None]:
    """Matplotlib's own settings and ours, whatever the user's are, for the time of a drawing."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # the font of the PNG lacks it; the SVG has it as text
        yield


def _compose(figure: "Figure", ranked: list[Row], name: str | None, label: str) -> None:
    with_memory = any(row.peak_memory for row in ranked)
    widths = [4, 1] if with_memory else [1]
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    _draw_objective(panels[0], ranked, name)
    panels[0].set_xlabel(label)
    if with_memory:
        _draw_memory(panels[1], ranked)
    for panel in panels:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    has_winner = bool(ranked) and not math.isnan(_value(ranked[0], name))
    _name_rows(panels[0], ranked, has_winner)


def _name_rows(panel: "Axes", ranked: list[Row], has_winner: bool) -> None:
    names = [shorten(one_line(label), _LONGEST_LABEL) for label in labels(ranked)]
    panel.set_yticks(range(len(ranked)), names, color=_INK)
    panel.set_ylim(max(len(ranked), 3) - 0.4, -0.6)
    for label, row in zip(panel.get_yticklabels(), ranked, strict=True):
        label.set_color(_INK if row.status is Status.ok else _FAILED)
    if has_winner:
        panel.get_yticklabels()[0].set_fontweight("bold")
        panel.get_yticklabels()[0].set_color(_WINNER)


def _value(row: Row, name: str | None) -> float:
    return row.numbers.get(name, math.nan) if name is not None and row.status is Status.ok else math.nan


def _draw_objective(panel: "Axes", ranked: list[Row], name: str | None) -> None:
    values = [_value(row, name) for row in ranked]
    _set_limits(panel, values)
    if any(value < 0 for value in values):
        panel.axvline(0, color=_INK, linewidth=0.8)
    for y, (row, value) in enumerate(zip(ranked, values, strict=True)):
        if row.status is not Status.ok:
            _mark_failure(panel, y, row)
        elif math.isnan(value):
            said = "nan" if name in row.numbers else "no number"
            _write(panel, 0.0, y, said, xycoords=("axes fraction", "data"), color=_INK, style="italic")
        else:
            _draw_bar(panel, y, value, is_winner=y == 0)


def _set_limits(panel: "Axes", values: list[float]) -> None:
    """From zero to the longest bar, with room for the numbers at the ends of bars."""
    finite = [value for value in values if _fits(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    span = high - low if high - low > 1e-300 else 1.0
    below, above = any(value < 0 for value in values), any(value >= 0 for value in values) or not finite
    longest = max((len(short(value)) for value in values), default=0) + len("  best")
    share = min(0.0145 * longest, 0.3)  # of the panel, on each side that has bars
    room = span * share / (1 - share * (below + above))
    panel.set_xlim(low - room * below, high + room * above)
    if not finite:
        panel.set_xticks([])


def _fits(value: float) -> bool:
    """Whether a bar can be drawn to scale; an axis cannot end at the largest numbers there are."""
    return abs(value) < 1e300


def _draw_bar(panel: "Axes", y: int, value: float, *, is_winner: bool) -> None:
    low, high = panel.get_xlim()
    end = min(max(value, low), high)  # what does not fit: to the edge
    panel.barh(y, end, height=0.68, color=_WINNER if is_winner else _MUTED, linewidth=0)
    text = f"{short(value)}  best" if is_winner else short(value)
    # Outside the bar at its end; inside where that is the edge.
    leftwards = (value < 0) == _fits(value)
    ink = (_WINNER if _fits(value) else "white") if is_winner else _INK
    style = {"ha": "right" if leftwards else "left", "color": ink, "weight": "bold" if is_winner else "normal"}
    _write(panel, end, y, text, offset=-4 if leftwards else 4, **style)


def _mark_failure(panel: "Axes", y: int, row: Row) -> None:
    panel.axhspan(y - 0.34, y + 0.34, facecolor="#fbeceb", edgecolor="#eeb4ae", hatch="////", linewidth=0)
    error = one_line(row.error)
    text = f"\N{MULTIPLICATION SIGN} {row.status.words}{f': {error}' if error else ''}"
    text = f"{text[: _LONGEST_ERROR - 3]}..." if len(text) > _LONGEST_ERROR else text
    backed = {"facecolor": "#fbeceb", "edgecolor": "none", "pad": 1.0}
    _write(panel, 0.0, y, text, xycoords=("axes fraction", "data"), color=_FAILED, bbox=backed)


def _write(panel: "Axes", x: float, y: int, text: str, *, offset: int = 4, **style: Any) -> None:
    note = panel.annotate(text, (x, y), (offset, 0), textcoords="offset points", va="center_baseline", fontsize=8, **style)
    note.set_in_layout(False)


def _draw_memory(panel: "Axes", ranked: list[Row]) -> None:
    """From the emptiest to the fullest rank, with a dot and a number at the fullest."""
    panel.set_xlabel("peak memory, MiB\n(emptiest to fullest rank)", fontsize=8)
    highest = max(max(row.peak_memory) for row in ranked if row.peak_memory) / 2**20
    panel.set_xlim(0, (highest or 1.0) * 1.9)
    panel.locator_params(axis="x", nbins=3)
    panel.tick_params(axis="x", labelsize=8)
    for y, row in enumerate(ranked):
        if row.peak_memory:
            least, most = min(row.peak_memory) / 2**20, max(row.peak_memory) / 2**20
            panel.plot([least, most], [y, y], color="#6b7785", linewidth=1.4, solid_capstyle="butt")
            panel.plot([most], [y], marker="o", markersize=3.5, color="#6b7785")
            _write(panel, most, y, peak_mib(row), color="#55606b")
