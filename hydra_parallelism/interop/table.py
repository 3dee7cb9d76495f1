"""The table of ``docs/interop.md``, from the rows that the conversions use.

``python -m hydra_parallelism.interop.table docs/interop.md`` writes it there.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from .fields import OURS_ALONE, Field, Target, lookup
from .ours import leaves

__all__ = ["BEGIN", "END", "MODULES", "markdown", "targets", "write"]

BEGIN = "<!-- python -m hydra_parallelism.interop.table docs/interop.md: begin -->"
END = "<!-- end -->"

MODULES = (
    "transformers",
    "lerobot",
    "accelerate",
    "torchtitan",
    "diffusers",
    "lightning",
    "nemo",
)
"""The modules of targets, in the order of the table's columns."""


def targets() -> dict[str, Target]:
    """Module -> its target."""
    return {name: import_module(f".{name}", __package__).TARGET for name in MODULES}


def write(path: Path) -> None:
    """Put the table between the two marks of a file.

    Raises:
        ValueError: The file does not have both marks.
    """
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no {BEGIN} followed by {END}")
    path.write_text(f"{before}{BEGIN}\n{markdown()}{END}{after}", encoding="utf-8")


def markdown() -> str:
    """One row for each key of ours and one column for each target; below it, target by target, what the rows say."""
    known = targets()
    head = ["`parallelism.`", *(f"{target.library} `{target.name}`" for target in known.values())]
    lines = [_line(head), _line(["---"] * len(head))]
    axes = dict.fromkeys(row.ours for target in known.values() for row in target.fields if row.ours)
    keys = [path for path in leaves() if lookup(OURS_ALONE, path) is None]
    for path in [*keys, *(axis for axis in axes if axis not in keys)]:
        cells = [_cell(target, path) for target in known.values()]
        lines.append(_line([f"`{path}`" if path in keys else f"axis `{path}`", *cells]))
    for target in known.values():
        lines += ["", f"{target.library} `{target.name}` ({target.version}):", "", *_remarks(target)]
    return "\n".join(lines) + "\n"


def _cell(target: Target, path: str) -> str:
    theirs = [f"`{row.theirs}`" for row in target.fields if row.ours == path and row.theirs is not None]
    if path in leaves() and lookup(target.cannot, path) is not None:
        return "refused" + (f" (read from {', '.join(theirs)})" if theirs else "")
    silent = any(row.ours == path and row.theirs is None for row in target.fields)
    return ", ".join(theirs) or ("no field, see below" if silent else "")


def _remarks(target: Target) -> Iterator[str]:
    for row in target.fields:
        if row.says or row.ours is None:
            yield f"- {_title(row)}: {row.says}"
    reasons: dict[str, list[str]] = {}
    for path, reason in target.cannot.items():
        reasons.setdefault(reason, []).append(f"`{path}*`" if path.endswith(".") else f"`{path}`")
    for reason, paths in reasons.items():
        yield f"- refused: {', '.join(paths)} ({reason})"


def _title(row: Field) -> str:
    if row.ours is None:
        return f"`{row.theirs}`, which we have nothing for"
    if row.theirs is None:
        return f"no field for `{row.ours}`"
    return f"`{row.theirs}`" if row.theirs == row.ours else f"`{row.theirs}` ({row.ours})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
