"""One row for each field of a target, and what both directions do with the rows.

A target module declares one :class:`Target`. ``give`` (ours to theirs), ``take`` (theirs to ours) and the table in
``docs/interop.md`` read the same rows, so the table says what the code does. Every key of ours is in a row, in ``cannot``, or
in :data:`OURS_ALONE`; a test sees to that, for every target.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..topology import AXES
from .ours import Ours, default, leaves

__all__ = [
    "Field",
    "OURS_ALONE",
    "Target",
    "give",
    "lookup",
    "own_plan",
    "read_theirs",
    "refuse",
    "refuse_theirs",
    "switch",
    "take",
    "whole",
]

OURS_ALONE = ("world_size", "inference", "enable_expert_parallel", "runtime.", "dry_run", "simulate.")
"""Keys of ours that no target is told (a dot at the end: all keys below). They say how many processes there are and how they
meet, which a target learns from the launcher, or take the place of a job; an alias is resolved into what it stands for."""


def _same(value: Any) -> Any:
    return value


def own_plan(value: Any) -> Any:
    """For a plan where the target's models know theirs: ``null`` and ``auto`` mean that, a mapping is something else.

    Raises:
        ConfigurationError: A mapping.
    """
    if value not in (None, "auto"):
        raise ConfigurationError("its models are split by their own plan\n    try: auto")
    return value


def whole(value: Any) -> Any:
    """A size of theirs, for ``Field.back``: they refuse what is below 1, where ours may be ``-1``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError("must be a whole number of at least 1")
    return value


def switch(value: Any) -> Any:
    """A switch of theirs, for ``Field.back``."""
    if not isinstance(value, bool):
        raise ConfigurationError("must be true or false")
    return value


@dataclass(frozen=True)
class Field:
    """One row: a field of theirs and what it is here."""

    theirs: str | None
    """Their dotted key, or ``None``: they have nothing for ours."""
    ours: str | None
    """Our dotted key below ``parallelism``, or a derived axis such as ``cp``. ``None``: we have nothing for theirs."""
    says: str = ""
    """A word on the conversion, for the table and for refusals."""
    default: Any = None
    """Their value that need not be said: ``give`` leaves it out. Where ``ours`` is ``None``, the only value ``take`` takes."""
    out: Callable[[Any], Any] = _same
    """Our value to theirs."""
    back: Callable[[Any], Any] = _same
    """Their value to ours. Both raise ``ConfigurationError`` with what is wrong with a value, without its name."""
    by_hand: bool = False
    """Whether the target's own functions convert it, because more than this one value takes part."""


@dataclass(frozen=True)
class Target:
    """Another library's description of a layout."""

    name: str
    """Their class, as one would say it: ``DistributedConfig``."""
    library: str
    """The package to install, as its index spells it."""
    version: str
    """The release that the tests ran with."""
    fields: tuple[Field, ...]
    """Their fields, in their order."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Our dotted key (with a dot at the end: all keys below) -> why they cannot express it."""

    def row(self, ours: str) -> Field:
        """The row of a key of ours.

        Raises:
            KeyError: No row has it.
        """
        for entry in self.fields:
            if entry.ours == ours:
                return entry
        raise KeyError(ours)


def lookup(entries: Iterable[str], path: str) -> str | None:
    """The entry that speaks of a key: the key itself, or one with a dot at the end that it is below. The first wins."""
    return next((entry for entry in entries if path == entry or (entry.endswith(".") and path.startswith(entry))), None)


def give(target: Target, ours: Ours, *, also: Iterable[str] = ()) -> dict[str, Any]:
    """Our side as keyword arguments of theirs, nested where their keys are dotted. Rows whose axis is derived are included.

    Args:
        target: Whom to tell.
        ours: What to tell.
        also: What else the target cannot express, each with the key, its value and what to type instead.

    Raises:
        ConfigurationError: Something is set that the target cannot express; all such keys at once.
    """
    refuse(target, ours, also=also)
    result: dict[str, Any] = {}
    for row in target.fields:
        if row.theirs is None or row.ours is None or row.by_hand:
            continue
        value = row.out(ours[row.ours])
        if value == row.default and type(value) is type(row.default):
            continue
        *path, name = row.theirs.split(".")
        inner = result
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return result


def refuse(target: Target, ours: Ours, *, also: Iterable[str] = ()) -> None:
    """Refuse what a target cannot express.

    A key that does nothing at these degrees (a plan for an axis of size 1, say) asks for nothing, so nothing is lost.

    Raises:
        ConfigurationError: Names each key with its value, why, and what to type instead.
    """
    problems: list[str] = []
    for path in leaves():
        entry = lookup(target.cannot, path)
        reason = _refusal(target, ours, path) if entry is None else target.cannot[entry]
        if reason is not None and ours.is_set(path):
            remedy = f"\n    try: {ours.key}.{path}={_plain(default(path))}"
            problems.append(f"{ours.key}.{path}={_plain(ours[path])}: {reason}{'' if 'try:' in reason else remedy}")
    _raise(f"{target.library} {target.name} cannot express this layout:", [*problems, *also])


def _refusal(target: Target, ours: Ours, path: str) -> str | None:
    """Why a row cannot convert the value that we have, if so."""
    for row in target.fields:
        if row.ours == path and not row.by_hand:
            try:
                row.out(ours[path])
            except ConfigurationError as error:
                return str(error)
    return None


def take(target: Target, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Their values, flat (see :func:`read_theirs`), as ours: dotted key -> value. What they leave out is left out.

    Rows of derived axes have no key to be put under: they are skipped, and the target's own function sees to them.

    Raises:
        ConfigurationError: Unknown fields, values that mean nothing here, fields we have nothing for; all at once.
    """
    rows = {row.theirs: row for row in target.fields if row.theirs is not None}
    problems = [_unknown(target, name) for name in theirs if name not in rows]
    found: dict[str, Any] = {}
    for name, value in theirs.items():
        row = rows.get(name)
        if row is None or row.by_hand:
            continue
        if row.ours is None:
            if value is not None and value != row.default:
                problems.append(f"{name}={value!r}: {row.says}\n    try: {name}={row.default!r}")
        elif value is not None and row.ours not in _DERIVED:
            try:
                found[row.ours] = row.back(value)
            except ConfigurationError as error:
                problems.append(f"{name}={value!r}: {error}")
    refuse_theirs(target, problems)
    return found


def refuse_theirs(target: Target, problems: list[str]) -> None:
    """Refuse what theirs says, if there is anything to refuse.

    Raises:
        ConfigurationError: All problems at once.
    """
    _raise(f"{target.library} {target.name} cannot be taken over:", problems)


def read_theirs(target: Target, source: Any, *, under: str | None = None) -> dict[str, Any]:
    """Their description as flat data: dotted key -> value, nested only where a row's key is dotted. Pure but for a file.

    Args:
        target: Whose description.
        source: An instance of their class, a mapping, or the path of a JSON file.
        under: Key of a larger file or mapping under which the description may lie, e.g. ``parallelism``.

    Raises:
        ConfigurationError: Not a description, or no such file.
    """
    plain = _as_mapping(target, source)
    if under is not None and isinstance(plain.get(under), Mapping):
        plain = plain[under]
    return dict(_flatten(target, plain, ""))


_DERIVED = frozenset(AXES) - set(leaves())


def _as_mapping(target: Target, source: Any) -> Mapping[str, Any]:
    if isinstance(source, str | Path):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_once)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{source} is not a JSON file of {target.name}: {error}") from error
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return _public(source)
    if isinstance(source, Mapping):
        return source
    raise ConfigurationError(
        f"{target.name} can be read from an instance, a mapping, or the path of a JSON file, not from {type(source).__name__}"
    )


def _public(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass and of those in it, not what it keeps for itself (meshes, say)."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(instance):
        if not entry.name.startswith("_"):
            value = getattr(instance, entry.name)
            is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
            found[entry.name] = _public(value) if is_nested else value
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose keys come once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key comes twice in {', '.join(name for name, _ in pairs)}")
    return found


def _flatten(target: Target, node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    nested = {row.theirs.rpartition(".")[0] for row in target.fields if row.theirs and "." in row.theirs}
    for name, value in node.items():
        path = f"{prefix}{name}"
        if path in nested and isinstance(value, Mapping):
            yield from _flatten(target, value, f"{path}.")
        elif path not in nested or value is not None:
            yield path, value


def _unknown(target: Target, name: str) -> str:
    known = [row.theirs for row in target.fields if row.theirs is not None]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{name}: {target.name} has no such field" + (f"; did you mean {near[0]}?" if near else f": {', '.join(known)}")


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(getattr(value, "name", value))


def _raise(head: str, problems: list[str]) -> None:
    if problems:
        raise ConfigurationError("\n  ".join([head, *problems]))
