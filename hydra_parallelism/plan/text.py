"""A report for people: sections with aligned columns, through rich where that is installed and wanted."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..topology import BASE_AXES, DERIVED_AXES, SPARSE_AXES

__all__ = ["Table", "has_rich", "price_tables", "print_rich", "show", "spell", "tables", "warnings_in", "write"]

_KINDS = {"default": "the world's own", "self": "this rank alone", "made": "made for these"}


@dataclass(frozen=True)
class Table:
    """A section: a title, a head and rows of words."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(report: dict[str, Any]) -> list[Table]:
    """The sections of a report, the warnings excepted."""
    rank = report["rank"]["rank"]
    degrees = report["degrees"]
    return [
        Table(
            "resolved degrees: axes of the world, outermost first; what they make together; what experts see",
            (*BASE_AXES, *DERIVED_AXES, *SPARSE_AXES),
            [tuple(str(degrees[axis]) for axis in (*BASE_AXES, *DERIVED_AXES, *SPARSE_AXES))],
        ),
        _grid(report),
        Table(
            f"groups of rank {rank}, which is on node {report['rank']['node']} and reads share {report['rank']['dp_rank']} "
            f"of {degrees['dp']}",
            ("axis", "size", "ranks", "nodes", "all groups of the axis"),
            [
                (e["axis"], f"{e['size']:,}", spell(e["ranks"]), spell(e["nodes"]), _whether_inside(e["inside_nodes"]))
                for e in report["axes"]
            ]
            or [("none: every axis has one rank", "", "", "", "")],
        ),
        Table(
            f"communicators of rank {rank}; axes with the same ranks share one",
            ("axes", "ranks", "communicator", "in the world"),
            [
                (_shorten(e["axes"]), spell(e["ranks"]), _KINDS[e["kind"]], f"{e['in_world']:,}")
                for e in report["communicators"]
            ],
        ),
        Table(
            "gradients, in the order in which it happens",
            ("of", "operation", "over", "ranks"),
            [(e["of"], e["operation"], e["axis"], f"{e['size']:,}") for e in report["gradients"]]
            or [("nothing is reduced", "", "", "")],
        ),
        *(price_tables(report["price"], rank) if "price" in report else []),
    ]


def warnings_in(report: dict[str, Any]) -> list[str]:
    """Those of the layout and those of the model on it."""
    return [*report["warnings"], *report.get("price", {}).get("warnings", [])]


def price_tables(price: dict[str, Any], rank: int) -> list[Table]:
    """What a model costs: the sections of a report that has a price."""
    memory, moved = price["memory"], price["traffic"]
    kept = [(name, memory[name], " (host)" if memory["on_host"] else "") for name in ("parameters", "gradients", "optimizer")]
    rows = [
        *kept,
        ("gathered", memory["gathered"], ""),
        ("activations", memory["activations"], ""),
        ("total", memory["device"], ""),
    ]
    sizes = [(f"{name}{where}", "unknown" if size is None else f"{size / 1e9:,.3f}") for name, size, where in rows]
    room = price["machine"]["memory_bytes"] / 1e9
    found = [Table(f"memory of the fullest rank, which has {room:g} GB; {price['params']:,} parameters", ("what", "GB"), sizes)]
    if moved is not None:
        found.append(
            Table(
                f"sent by rank {rank} in a step, {1e3 * price['seconds']:,.3f} ms if nothing overlaps; "
                f"inside a node {_link(price['machine']['intra'])}, between nodes {_link(price['machine']['inter'])}",
                ("axis", "operation", "what", "count", "MB", "ms"),
                [
                    (
                        e["axis"],
                        e["operation"],
                        e["what"],
                        f"{e['count']:,.0f}",
                        f"{e['bytes'] / 1e6:,.3f}",
                        f"{1e3 * e['seconds']:,.3f}",
                    )
                    for e in moved
                ]
                or [("nothing is sent", "", "", "", "", "")],
            )
        )
    if price["pipeline"] is not None:
        idle = price["pipeline"]["bubble"]
        share = "no formula" if idle is None else f"{100 * idle:.1f} % of the time that computing takes"
        row = (price["pipeline"]["schedule"], str(price["pipeline"]["microbatches"]), share)
        found.append(Table("pipeline", ("schedule", "micro-batches", "bubble"), [row]))
    return found


def show(report: dict[str, Any]) -> str:
    """The whole report as plain text, without a line end at its end."""
    parts = [headline(report)]
    parts += ["\n".join([table.title, *_align([table.head, *table.rows])]) for table in tables(report)]
    parts.append("\n".join(f"warning: {text}" for text in warnings_in(report)) or "no warnings")
    return "\n\n".join(parts)


def write(report: dict[str, Any]) -> None:
    """The report on stdout: through rich on a terminal, as plain text elsewhere."""
    if sys.stdout.isatty() and has_rich():
        print_rich(report)
    else:
        sys.stdout.write(f"{show(report)}\n")


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def print_rich(report: dict[str, Any]) -> None:
    """The report through rich: on a terminal in colour and as wide as that is.

    Raises:
        ConfigurationError: rich is not installed.
    """
    if not has_rich():
        raise ConfigurationError("--format rich: rich is not installed\n  try: --format text, or pip install rich")
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(headline(report), style="bold"))
    for table in tables(report):
        shown = RichTable(title=Text(table.title), title_justify="left", title_style="")
        for name in table.head:
            shown.add_column(name)
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
    for text in warnings_in(report):
        console.print(Text(f"warning: {text}", style="yellow"))
    if not warnings_in(report):
        console.print(Text("no warnings", style="green"))


def headline(report: dict[str, Any]) -> str:
    """The degrees that are not 1, and where they run; then what that is in words."""
    degrees, machine = report["degrees"], report["machine"]
    factors = " * ".join(f"{axis}={degrees[axis]}" for axis in BASE_AXES if degrees[axis] > 1) or "1"
    experts = f", ep={degrees['ep']} efsdp={degrees['efsdp']}" if degrees["ep"] > 1 else ""
    where = f"{_count(machine['nodes'], 'node')} of {machine['per_node']}"
    return f"{factors} = {_count(report['world_size'], 'rank')}{experts} on {where}\n{_in_words(degrees)}"


def _in_words(degrees: dict[str, int]) -> str:
    copies = f" ({degrees['dp_replicate']:,} copies)" if degrees["dp_replicate"] > 1 else ""
    said = {
        f"{degrees['pp']} pipeline stages": degrees["pp"],
        f"{degrees['dp']:,} shares of each batch": degrees["dp"],
        f"parameters in {degrees['fsdp']:,} shards{copies}": degrees["fsdp"],
        "parameters on every rank whole, gradients averaged": 1 if degrees["fsdp"] > 1 else degrees["dp_replicate"],
        "one branch of guidance on each half of the ranks": degrees["cfg"],
        f"each sequence over {degrees['cp']} ranks": degrees["cp"],
        f"each layer over {degrees['tp']} ranks": degrees["tp"],
        f"experts over {degrees['ep']} ranks": degrees["ep"],
    }
    return "; ".join(text for text, size in said.items() if size > 1) or "one process, nothing is split"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _whether_inside(inside: bool) -> str:
    return "stay inside a node" if inside else "cross nodes"


def _link(link: dict[str, float]) -> str:
    return f"{link['bytes_per_s'] / 1e9:g} GB/s and {1e6 * link['latency_s']:g} us"


def spell(runs: Sequence[Sequence[int]]) -> str:
    """``[[0, 7, 1], [16, 64, 16]]`` as ``0-7, 16-64 by 16``."""
    words: list[str] = []
    for first, last, step in runs:
        if first == last:
            words.append(str(first))
        elif last == first + step:
            words.append(f"{first}, {last}")
        else:
            words.append(f"{first}-{last}" + (f" by {step}" if step > 1 else ""))
    return ", ".join(words) if len(words) <= 6 else f"{', '.join(words[:5])}, ... {words[-1]}"


def _shorten(axes: Sequence[str]) -> str:
    return ", ".join(axes) if axes else "none, but every job has it"


def _grid(report: dict[str, Any]) -> Table:
    outer = list(report["grid"][0]["at"])
    inner = next((axis for axis in reversed(BASE_AXES) if report["degrees"][axis] > 1), "rank")
    rows: list[tuple[str, ...]] = []
    following = 0
    for row in report["grid"]:
        first, last = row["ranks"]
        if first > following:
            skipped = (first - following) // (last - first + 1)
            rows.append((*("..." for _ in outer), f"... {_count(skipped, 'row')}", "..."))
        rows.append((*(str(row["at"][axis]) for axis in outer), _range(row["ranks"]), _range(row["nodes"])))
        following = last + 1
    return Table(f"the grid of ranks, {inner} innermost", (*outer, f"ranks along {inner}", "node"), rows)


def _range(ends: Sequence[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
