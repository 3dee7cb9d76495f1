"""All ranks agree that the job may start, or all of them refuse, before anything that could hang.

Every rank comes with either a fingerprint of what it is about to build or the error that keeps it from it. Rank 0's
fingerprint is the reference. The first rank that has something to object (its own error, or a fingerprint that differs from
rank 0's) writes the verdict; without objections the last rank to arrive does. Then everybody reads it. A rank needs a handful
of look-ups in the store, however large the world is.
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import ConfigurationError, LaunchError, ParallelismError
from .rendezvous import serves_store
from .world import World

__all__ = ["settle"]

_GRACE = timedelta(seconds=10)


def settle(
    store: dist.Store,
    world: World,
    fingerprint: Mapping[str, Any],
    error: Exception | None,
    *,
    timeout: timedelta,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Agree to start. Collective.

    Args:
        store: The job's store.
        world: Who takes part.
        fingerprint: Flat mapping of what must be equal on all ranks; ignored when there is an error.
        error: What keeps this rank from starting.
        timeout: How long to wait for the other ranks.
        announce: Told the refusal on exactly one rank, before any other rank can learn of it and exit.

    Raises:
        ConfigurationError, LaunchError: The refusal, the same on every rank: the error of the first rank that has one, or the
            keys in which two ranks differ, or how many ranks never arrived.
    """
    if world.processes == 1:
        if error:
            raise error
        return
    store.set_timeout(timeout)
    try:
        verdict = _vote(store, world, fingerprint, error, timeout, announce)
    except dist.DistError as lost:
        verdict = _give_up(store, world, timeout, lost, announce)
    if verdict is not None:
        _stay_for_the_others(store, world)
        raise _revive(verdict, announced=announce is not None) from error


def _vote(
    store: dist.Store,
    world: World,
    fingerprint: Mapping[str, Any],
    error: Exception | None,
    timeout: timedelta,
    announce: Callable[[str], None] | None,
) -> dict[str, str] | None:
    """The verdict of all ranks; ``None`` is a start."""
    if world.rank == 0:
        store.set("fingerprint", json.dumps(None if error else dict(fingerprint), default=str))
    refusal = _compare(store, world, fingerprint, error)
    if refusal:
        _object(store, refusal, announce)
    if store.add("arrived", 1) == world.size and not store.add("objections", 0):
        store.set("verdict", json.dumps(None))
    verdict: dict[str, str] | None = json.loads(store.get("verdict"))
    return verdict


def _object(store: dist.Store, refusal: dict[str, str], announce: Callable[[str], None] | None) -> None:
    if store.add("objections", 1) == 1:
        if announce:
            announce(refusal["text"])
        store.set("verdict", json.dumps(refusal))


def _give_up(
    store: dist.Store,
    world: World,
    timeout: timedelta,
    lost: dist.DistError,
    announce: Callable[[str], None] | None,
) -> dict[str, str]:
    """Somebody never came. Say so, to the others too, as long as the store is there."""
    text = (
        f"rank {world.rank} waited {timeout.total_seconds():g} s for the other ranks: "
        f"{_arrived(store)} of {world.size} ({world.source()}) arrived\n"
        "  try: look into the logs of the missing ranks, or a longer runtime.start_timeout_s"
    )
    refusal = {"kind": "LaunchError", "text": text}
    try:
        _object(store, refusal, announce)
        if store.check(["verdict"]):
            refusal = json.loads(store.get("verdict")) or refusal
    except dist.DistError:
        refusal["text"] += f"\n  the store is gone: {lost}"
        if announce:
            announce(refusal["text"])
    return refusal


def _compare(store: dist.Store, world: World, mine: Mapping[str, Any], error: Exception | None) -> dict[str, str] | None:
    """What this rank has to object: its own error, and in what its config differs from rank 0's if that one is content."""
    theirs = json.loads(store.get("fingerprint")) if world.rank else None
    own = json.loads(json.dumps(dict(mine), default=str))
    compared = own if error else {**(theirs or {}), **own}  # a rank with an error has no more than its config to show
    differing = [key for key in compared if theirs is not None and theirs.get(key) != own.get(key)]
    if not differing:
        return _describe(error, world) if error else None
    lines = [
        "ranks disagree:",
        f"  rank 0 has {', '.join(f'{key}={(theirs or {}).get(key)}' for key in differing)}",
        f"  rank {world.rank} has {', '.join(f'{key}={own.get(key)}' for key in differing)}",
        "  try: start all ranks with the same overrides and the same config files",
    ]
    if error:
        lines.insert(0, _describe(error, world)["text"])
    return {"kind": "ConfigurationError", "text": "\n".join(lines)}


def _describe(error: Exception, world: World) -> dict[str, str]:
    known = isinstance(error, ParallelismError)
    text = str(error) if known else f"rank {world.rank} cannot start: {type(error).__name__}: {error}"
    return {"kind": type(error).__name__ if known else "LaunchError", "text": text}


def _arrived(store: dist.Store) -> str:
    try:
        return str(store.add("arrived", 0))
    except RuntimeError:
        return "an unknown number"


def _stay_for_the_others(store: dist.Store, world: World) -> None:
    """Whoever serves the store leaves last, or the others would lose the verdict with it."""
    try:
        if store.add("left", 1) == world.size:
            store.set("all left", "")
        if serves_store(world):
            store.wait(["all left"], _GRACE)
    except dist.DistError:
        return


def _revive(verdict: Mapping[str, str], *, announced: bool) -> ParallelismError:
    kinds = {"ConfigurationError": ConfigurationError, "LaunchError": LaunchError}
    error = kinds.get(verdict["kind"], ParallelismError)(verdict["text"])
    error.announced = announced
    return error
