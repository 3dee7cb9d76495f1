"""Pages and pictures that come from the code: the reference, and the drawing of the rank layout.

``python docs/_generate.py`` draws ``rank_layout.svg`` again. The reference pages are not kept: ``conf.py`` writes them.
Reads the source where it can (docstrings of fields exist nowhere else) and imports no torch.
"""

import ast
import contextlib
import io
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import hydra_parallelism
from hydra_parallelism import _answers, config, launcher_config, resolvers, store, sweeper_config, topology
from hydra_parallelism.plan.cli import main as hydra_parallelism_command

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "hydra_parallelism"
LAYOUT = ["parallelism.dp_replicate=2", "parallelism.dp_shard=4", "parallelism.tp_size=2", "world.nodes=2", "world.per_node=8"]
"""The layout that the concepts page draws."""

Key = tuple[str, str, str, str]
"""Dotted path, type, default, meaning."""


def write_reference() -> None:
    """Write ``reference/``."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # Sphinx builds again what is newer
            path.write_text(text)


def pages() -> dict[str, str]:
    """Name of a reference page -> its text."""
    return {
        "config": config_page(),
        "presets": presets_page(),
        "resolvers": resolvers_page(),
        "api": api_page(),
        "messages": messages_page(),
    }


def rank_layout() -> str:
    """The drawing of the layout that the concepts page explains."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = hydra_parallelism_command(["plan", "--format", "svg", *LAYOUT])
    if code:
        raise SystemExit(code)
    return said.getvalue()


def keys(root: str) -> list[Key]:
    """Every key below ``parallelism``, ``hydra.launcher`` (torchrun) or ``hydra.sweeper`` (layouts)."""
    module, name = {
        "parallelism": (config, "ParallelismConfig"),
        "hydra.launcher": (launcher_config, "TorchrunConfig"),
        "hydra.sweeper": (sweeper_config, "LayoutsConfig"),
    }[root]
    return list(_keys(getattr(module, name), root))


def _keys(schema: type, path: str) -> Iterator[Key]:
    source = LIBRARY / f"{schema.__module__.rpartition('.')[2]}.py"
    body = next(n.body for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == schema.__name__)
    for field, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or field.target.id == "_target_":
            continue
        kind = ast.unparse(field.annotation)
        inner = getattr(__import__(schema.__module__, fromlist=["_"]), kind, None)
        where = f"{path}.{field.target.id}"
        if isinstance(inner, type) and hasattr(inner, "__dataclass_fields__"):
            yield from _keys(inner, where)
            continue
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        yield where, _kind(kind, inner), _default(getattr(schema(), field.target.id)), " ".join(str(said).split())


def _kind(annotation: str, found: object) -> str:
    plain = re.sub(r"Optional\[(.*)\]", r"\1 | None", annotation).replace(" | None", " or null")
    of_enum = re.match(r"\w+", plain)
    enum = getattr(config, of_enum[0], found) if of_enum else found
    if isinstance(enum, type) and issubclass(enum, Enum):
        return " or ".join([", ".join(f"`{member.name}`" for member in enum), *["null"] * plain.endswith("null")])
    return plain


def _default(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    plain = {None: "null", True: "true", False: "false", "": "''"}
    return plain[value] if isinstance(value, (str, bool, type(None))) and value in plain else str(value)


def config_page() -> str:
    """Every key of the config."""
    parts = [
        "# Config keys\n",
        "Read from the structured configs. `-1` means: what is left. `null` is Hydra's word for no value.\n",
        "## parallelism.*\n\nComes with `parallelism=PRESET`.\n",
        _definitions(keys("parallelism")),
        "## hydra.launcher.*\n\nOf `hydra/launcher=torchrun`, which every preset chooses.\n",
        _definitions(keys("hydra.launcher")),
        "## hydra.sweeper.*\n\nOf `hydra/sweeper=layouts`.\n",
        _definitions(keys("hydra.sweeper")),
    ]
    return "\n".join(parts)


def _definitions(listed: list[Key]) -> str:
    return "\n".join(f"`{path}`\n: {meaning} ({kind}; default `{default}`)\n" for path, kind, default, meaning in listed)


def presets_page() -> str:
    """Presets and the groups below them."""
    lines = ["# Presets\n", "`parallelism=NAME`, on top of the defaults:\n", "| name | sets |", "|---|---|"]
    lines += [f"| `{name}` | {_settings(node)} |" for name, node in store.PRESETS.items()]
    lines += ["\nSub-groups go with any of them:\n", "| option | sets |", "|---|---|"]
    for group, options in store.SUB_GROUPS.items():
        lines += [f"| `parallelism/{group}={name}` | {_settings({group: node})} |" for name, node in options.items()]
    return "\n".join([*lines, ""])


def _settings(node: dict[str, object], path: str = "") -> str:
    parts = []
    for name, value in node.items():
        inner = _settings(value, f"{path}{name}.") if isinstance(value, dict) else f"`{path}{name}={_default(value)}`"
        parts.append(inner)
    return " ".join(parts) or "nothing"


def resolvers_page() -> str:
    """The resolvers and the numbers they know."""
    said = ast.get_docstring(ast.parse((LIBRARY / "resolvers.py").read_text())) or ""
    known = {
        "of this process and its world": _answers._OF_PROCESS,
        "of the topology": _answers._OF_TOPOLOGY,
        "ranks along an axis": topology.AXES,
        "the same by the name of the key": [name for name, axis in _answers._ALIASES.items() if name != axis],
    }
    lines = ["# Resolvers\n", _plain(said) + "\n", "## Names\n", "| | names |", "|---|---|"]
    lines += [f"| {what} | {', '.join(f'`{name}`' for name in names)} |" for what, names in known.items()]
    lines += ["\nResolvers: " + ", ".join(f"`{name}`" for name in resolvers._RESOLVERS) + "\n"]
    return "\n".join(lines)


def api_page() -> str:
    """A page of autodoc directives, one for each public name."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in hydra_parallelism.__all__:
        kind = "Functions" if name[0].islower() else "Exceptions" if name.endswith("Error") else "Classes"
        kinds[kind].append(name)
    directives = {"Functions": "autofunction", "Classes": "autoclass", "Exceptions": "autoexception"}
    lines = ["# Python API\n", "All of it is in `hydra_parallelism`; importing that imports no torch.\n"]
    for kind, names in kinds.items():
        members = "\n   :members:" if kind == "Classes" else ""
        listed = "\n\n".join(f".. {directives[kind]}:: hydra_parallelism.{name}{members}" for name in names)
        lines += [f"## {kind}\n", f"```{{eval-rst}}\n{listed}\n```\n"]
    return "\n".join(lines)


def messages() -> dict[str, list[str]]:
    """Module -> the first lines of the messages it raises, with an ellipsis where a value goes."""
    found: dict[str, list[str]] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            raised = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if raised in ("ConfigurationError", "LaunchError", "ParallelismError") and isinstance(node, ast.Call) and node.args:
                first = _template(node.args[0]).split("\n")[0].strip()
                if len(re.sub(r"[…\W]", "", first)) > 8 and first not in found.setdefault(module, []):
                    found[module].append(first)
    return {module: lines for module, lines in found.items() if lines}


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        lines = node.args[0]  # a title, and then what is wrong
        return _template(lines.elts[0]) if isinstance(lines, ast.List) else "…"
    return "…"


def messages_page() -> str:
    """The first line of every message."""
    lines = [
        "# All messages\n",
        "The first line of every refusal, by the module that raises it; `…` stands for a name or a number. Most messages go on "
        "with the numbers and a `try:` line. The common ones are explained in [Troubleshooting](../troubleshooting.md).\n",
    ]
    for module, texts in messages().items():
        lines += [f"## {module}\n", "```text", *(textwrap.shorten(text, 300, placeholder=" …") for text in texts), "```\n"]
    return "\n".join(lines)


def _plain(docstring: str) -> str:
    return re.sub(r":\w+:`~?\.?(?:[\w.]*\.)?(\w+)(\(\))?`", r"`\1`", docstring)


if __name__ == "__main__":
    (HERE / "rank_layout.svg").write_text(rank_layout())
