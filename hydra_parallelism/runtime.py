"""The live half: process groups and meshes from job start to job end.

``init`` is collective and is the only thing that builds; ``current`` only looks up; ``shutdown`` takes down what ``init`` made
and nothing else. ``parallel_context`` is the three of them for notebooks, tests and the Compose API; under ``@hydra.main`` the
callback calls them.
"""

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import _compat, agreement, device, fake_groups, rendezvous, simulation
from . import world as world_module
from ._equation import read_degrees
from .config import ParallelismConfig, RuntimeConfig
from .errors import LaunchError, ParallelismError
from .holdings import Holdings
from .mesh import AxisGroups, Meshes, build_groups
from .options import flatten, read_config, read_options, warn
from .topology import Topology, resolve
from .world import World

__all__ = ["ParallelContext", "current", "init", "is_first", "parallel_context", "shutdown"]

_log = logging.getLogger(__name__)
_TEARDOWN_S = 30.0


@dataclass(frozen=True)
class ParallelContext:
    """What is alive during a job. Look-ups only: nothing here creates a group or reads the environment."""

    topology: Topology
    """The resolved layout."""
    world: World
    """The processes of the job, and where each number came from."""
    device: torch.device
    """The device of this rank."""
    mesh: Meshes
    """Device meshes by axis name or tuple of names: ``mesh["tp"]``, ``mesh["dp_replicate", "fsdp"]``."""
    backend: str
    """Backend of the process groups."""
    store: dist.Store
    """Key-value store shared by the ranks of this job, for small messages such as host names."""
    config: ParallelismConfig = field(default_factory=ParallelismConfig)
    """What the context was made with: the parallelism node as plain data. Degrees are in ``topology``, ``-1`` stays here."""
    key: str = "parallelism"
    """Dotted path of that node, for messages."""
    holdings: Holdings | None = None
    """What a simulated rank is seen to hold; ``None`` on a real one."""

    @property
    def rank(self) -> int:
        """Index of this process in the world."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """How many processes the job has."""
        return self.world.size

    @property
    def local_rank(self) -> int:
        """Index of this process on its node."""
        return self.world.local_rank

    @property
    def coordinate(self) -> dict[str, int]:
        """Base axis -> index of this rank along it."""
        return self.topology.coordinate(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which share of the batches this rank reads."""
        return self.topology.dp_rank(self.rank)

    @property
    def dp_world_size(self) -> int:
        """How many shares there are: dp_replicate * dp_shard."""
        return self.topology.dp_world_size


@dataclass
class _Session:
    """A context and what must be taken down with it."""

    context: ParallelContext
    groups: AxisGroups
    owns_default: bool
    process: int


_session: _Session | None = None
_failure: Exception | None = None
_jobs = 0


def init(config: Any, *, key: str = "parallelism", announce: Callable[[str], None] | None = None) -> ParallelContext:
    """Resolve a config on the launched processes and build its process groups. Collective: call on all ranks.

    Args:
        config: The parallelism node: a ``ParallelismConfig``, a mapping or a ``DictConfig``.
        key: Dotted path of the node, for messages.
        announce: Told a refusal on exactly one rank, before any rank raises it.

    Returns:
        The context, also available from :func:`current` until :func:`shutdown`.

    Raises:
        ConfigurationError: The config is not valid or does not fit, or the ranks were started with different ones.
        LaunchError: Processes or devices are missing.
        ParallelismError: A context is alive already.
    """
    global _session, _failure, _jobs
    if _session is not None:
        raise ParallelismError("a parallel context is alive already; hydra_parallelism.shutdown() it first")
    hook = sys.excepthook
    try:
        _session = _start(config, key, announce, job=_jobs)
    except Exception as error:
        _failure = error
        raise
    finally:
        _jobs += 1
        sys.excepthook = hook  # init_process_group wraps it once more each time
    _failure = None
    atexit.register(shutdown)  # Hydra 1.3 tells no callback of a Ctrl-C
    return _session.context


def current() -> ParallelContext:
    """The context of the running job.

    Raises:
        ParallelismError: There is none, or the start of this job failed: then the original error, again.
    """
    if _session is not None:
        return _session.context
    if _failure is not None:
        raise _failure
    raise ParallelismError(
        "no parallel context: choose a preset (defaults: [parallelism: default]) under @hydra.main, "
        "or use hydra_parallelism.parallel_context(config.parallelism)"
    )


def shutdown() -> None:
    """Take down what ``init`` made; a default group that was there before stays. Bounded in time, harmless when repeated."""
    global _session, _failure
    session, _session, _failure = _session, None, None
    atexit.unregister(shutdown)
    if session is None or session.process != os.getpid():  # a fork must leave its parent's groups alone
        return
    if session.context.holdings is not None:
        session.context.holdings.end(session.context.world, session.context.device.type)
    owned = [None] if session.owns_default else list(reversed(session.groups.made))
    worker = threading.Thread(target=_destroy, args=(owned,), daemon=True, name="hydra_parallelism teardown")
    worker.start()
    worker.join(_TEARDOWN_S)
    if worker.is_alive():
        _log.warning("the process groups of rank %d did not close within %g s", session.context.rank, _TEARDOWN_S)
        return
    world, store = session.context.world, session.context.store
    del session, owned, worker
    _compat.release_meshes()
    if world.processes > 1:
        _leave(world, store)


@contextmanager
def parallel_context(config: Any, *, key: str = "parallelism") -> Iterator[ParallelContext]:
    """``init`` on entry, ``shutdown`` on exit, whatever happens inside. Collective.

    Example:
        >>> with parallel_context(ParallelismConfig(dp_shard=-1)) as context:
        ...     print(context.topology)
    """
    context = init(config, key=key)
    try:
        yield context
    finally:
        shutdown()


def is_first(event: str) -> bool:
    """Whether no other rank of this job, or of a job that never started, has asked this before.

    Alone, and without a store that answers, a rank is first: rather told twice than not at all.
    """
    try:
        world = world_module.read()
        if world is None or world.size == 1:  # a simulated rank, too, has nobody beside it
            return True
        store = _session.context.store if _session else rendezvous.connect(world, "first", timeout=timedelta(seconds=10))
        return store.add(f"first/{event}", 1) == 1
    except (RuntimeError, LaunchError):
        return True


def _start(config: Any, key: str, announce: Callable[[str], None] | None, job: int) -> _Session:
    world = _read_world(config, key)
    plain, topology, bound, error = ParallelismConfig(), Topology(), torch.device("cpu"), None
    fingerprint: dict[str, Any] = {}
    try:
        plain.runtime = read_options(config, key)
        fingerprint = {f"{key}.{path}": value for path, value in flatten(config)}
        topology = resolve(config, world.size, source=world.source(), key=key)
        plain = read_config(config, key)
        bound = device.bind(device.choose_type(plain.runtime.device_type, key), world)
        fingerprint |= _describe(topology, bound, plain.runtime)
        if world.rank == 0 or world.simulated:
            warn(config, key, topology)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        error = caught
    wait = timedelta(seconds=plain.runtime.start_timeout_s)
    store = _job_store(world, job, wait)
    if world.simulated:
        store.set_timeout(timedelta(seconds=1))  # nobody will put in what is not there
    error = error or (None if world.simulated else _claim_device(store, bound))
    store.set(f"host/{world.rank}", socket.gethostname())
    agreement.settle(store, world, fingerprint, error, timeout=wait, announce=announce)
    session = _build(config, key, world, topology, bound, plain, store)
    _wait_for_all(world, store)
    return session


def _wait_for_all(world: World, store: dist.Store) -> None:
    """A rank with a short task must not be gone while another still connects to it."""
    if world.processes > 1:
        if store.add("built", 1) == world.size:
            store.set("all built", "")
        store.wait(["all built"])


def _read_world(config: Any, key: str) -> World:
    imagined = simulation.read(config, key)
    if imagined is not None:
        if dist.is_initialized():
            raise ParallelismError(
                f"{imagined.source()} makes process groups of its own, but torch has a default process group already\n"
                "  try: torch.distributed.destroy_process_group() before it, or no simulate.world_size"
            )
        return imagined
    world = world_module.read()
    if dist.is_initialized():
        # The user's own default group is the world, whatever the environment says.
        size, rank = dist.get_world_size(), dist.get_rank()
        if world is None or (world.size, world.rank) != (size, rank):
            world = World(size, rank, local_size=size, sources={"size": f"the default process group has {size} ranks"})
        return world
    if world is not None:
        return world
    planned = world_module.plan(read_degrees(config, key))
    if planned.size > 1:
        resolve(config, planned.size, source=planned.source(), key=key)
        raise LaunchError(
            f"{key} asks for {planned.size} processes ({planned.source()}), but nobody launched this one\n"
            f"  try: torchrun --standalone --nproc-per-node {planned.size} ..."
        )
    return planned


def _job_store(world: World, job: int, timeout: timedelta) -> dist.Store:
    if dist.is_initialized() and world.processes > 1:
        return dist.PrefixStore(f"hydra_parallelism/{job}", _compat.default_store())
    return rendezvous.connect(world, job, timeout=timeout)


def _claim_device(store: dist.Store, bound: torch.device) -> LaunchError | None:
    name = device.identity(bound)
    if name and store.add(f"device/{name}", 1) > 1:
        return LaunchError(f"two ranks are bound to the same device, {name}")
    return None


def _describe(topology: Topology, bound: torch.device, options: RuntimeConfig) -> dict[str, Any]:
    """What the config came to here and must be equal on all ranks."""
    backend = device.choose_backend(options.backend, bound.type)
    seen: dict[str, Any] = topology.degrees() | {"device": bound.type, "backend": backend}
    if dist.is_initialized():
        seen["process groups made before"] = _compat.registered_groups()
    return seen


def _build(
    config: Any,
    key: str,
    world: World,
    topology: Topology,
    bound: torch.device,
    plain: ParallelismConfig,
    store: dist.Store,
) -> _Session:
    began = time.perf_counter()
    owns_default = not dist.is_initialized()
    timeout = timedelta(seconds=plain.runtime.timeout_s)
    backend = device.choose_backend(plain.runtime.backend, bound.type, simulated=world.simulated)
    with rendezvous.loopback_only(world):
        if owns_default:
            _init_default(world, backend, bound, timeout, store)
        try:
            groups = build_groups(topology, world.rank, timeout=timeout)
        except BaseException:
            if owns_default:
                dist.destroy_process_group()
            raise
    meshes = Meshes(topology, world.rank, groups, bound.type)
    holdings = Holdings() if world.simulated else None
    context = ParallelContext(topology, world, bound, meshes, backend, store, plain, key, holdings)
    if holdings is not None:
        holdings.begin()
    if world.rank == 0 or world.simulated:
        _tell(config, key, context, len(groups.made) + 1, time.perf_counter() - began)
    return _Session(context, groups, owns_default, os.getpid())


def _init_default(world: World, backend: str, bound: torch.device, timeout: timedelta, store: dist.Store) -> None:
    if backend == "fake":
        fake_groups.register()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("groups", store),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=bound if bound.type == "cuda" else None,
    )


def _tell(config: Any, key: str, context: ParallelContext, groups: int, seconds: float) -> None:
    topology, world = context.topology, context.world
    degrees = read_degrees(config, key)
    if world.simulated:
        _log.info(
            "simulating rank %d of %d (%s): it is alone and its collectives do nothing, so losses mean nothing",
            *(world.rank, world.size, world.source()),
        )
    set_ = " * ".join(f"{axis}={size}" for axis, size in topology.degrees().items() if size > 1 and axis != "ep")
    experts = f", ep={topology.ep}" if topology.ep > 1 else ""
    nodes = f" on {world.nnodes} nodes" if world.nnodes > 1 else ""
    _log.info(
        "topology: %s%s = %d process(es)%s (%s), %s, %s, %d process group(s) in %.2f s%s",
        set_ or "all degrees 1",
        experts,
        world.size,
        nodes,
        world.source() if world.launched or world.simulated else "not launched",
        context.device.type,
        context.backend,
        groups,
        seconds,
        "; no degree is set, so DDP over all of them" if degrees.untouched and world.size > 1 else "",
    )


def _destroy(groups: list[Any]) -> None:
    for group in groups:
        if not dist.is_initialized():  # the task has destroyed everything itself
            return
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError) as error:  # a peer died, or the task destroyed this one
            _log.debug("destroying a process group: %s", error)


def _leave(world: World, store: dist.Store) -> None:
    """Rank 0 outlives the others when it serves the store: late look-ups of slower ranks would fail otherwise."""
    try:
        if store.add("done", 1) == world.size:
            store.set("all done", "")
        if rendezvous.serves_store(world):
            store.wait(["all done"], timedelta(seconds=_TEARDOWN_S))
    except (RuntimeError, dist.DistStoreError) as error:
        _log.debug("leaving the store: %s", error)
