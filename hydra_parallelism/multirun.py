"""The jobs of a sweep: each on fresh processes, as many as its own degrees ask for, some at a time."""

import functools
import io
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from . import interpolations, memory, run_mode, worker
from . import launch as launching
from .errors import ConfigurationError, LaunchError
from .failures import message_of, tell
from .logs import console_ranks
from .slots import Slots
from .topology import Topology, resolve

if TYPE_CHECKING:
    from .plan.case import Case

__all__ = ["Watch", "headline", "launch"]

_log = logging.getLogger(__name__)


class Watch(Protocol):
    """Is told of each job as it starts and ends, from several threads when several jobs run at a time."""

    def started(self, number: int) -> None:
        """A job's processes are about to start."""

    def ended(self, number: int, result: JobReturn, seconds: float) -> None:
        """A job has ended, well or not; also one that could not be started. Not one that a signal ended."""


@dataclass
class _Job:
    """One job: what was asked, what it came to."""

    number: int
    overrides: Sequence[str]
    config: DictConfig | None = None
    topology: Topology = field(default_factory=Topology)
    processes: int = 1
    console: set[int] = field(default_factory=lambda: {0})
    folder: Path = field(default_factory=Path)
    sent: worker.SentJob | None = None
    case: "Case | None" = None
    """Of a dry run, which is told and not run."""
    said: str = ""
    """Where the number of its processes comes from."""
    error: Exception | None = None
    main: ModuleType = field(default_factory=lambda: sys.modules["__main__"])
    """The user's script, which is hidden while jobs run."""
    value: Any = None
    """What rank 0 returned."""
    peak_memory: list[int] = field(default_factory=list)
    """Bytes, by rank; empty when the job failed."""

    @property
    def name(self) -> str:
        return f"#{self.number} {' '.join(filter_overrides(list(self.overrides)))}".rstrip()

    @functools.cached_property
    def result(self) -> JobReturn:
        """What Hydra is told. Ask when the job is over: it is made once."""
        result = JobReturn(overrides=list(self.overrides))
        if self.config is not None:
            result.hydra_cfg = OmegaConf.masked_copy(self.config, "hydra")
            result.cfg = OmegaConf.masked_copy(self.config, [str(key) for key in self.config if key != "hydra"])
            result.task_name = self.config.hydra.job.name
            result.working_dir = str(self.folder) if self.config.hydra.job.chdir else os.getcwd()
        memory.attach(result, self.peak_memory)
        result.return_value = self.value if self.error is None else self.error
        result.status = JobStatus.COMPLETED if self.error is None else JobStatus.FAILED
        return result


def launch(
    loader: ConfigLoader,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    numbers: Sequence[int],
    watch: Watch | None = None,
) -> list[JobReturn]:
    """Run jobs and return one result each, in order.

    Args:
        loader: Hydra's.
        config: The sweep's.
        job_overrides: What each job overrides.
        numbers: The number of each job, which also names its folder.
        watch: Told of each job, in place of the log lines that say the same.

    Raises:
        ConfigurationError: The launcher's options are not valid.
        SystemExit: A signal ended the sweep.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    options = run_mode.options_of(config)
    launching.check(options, options.nnodes)
    if options.nnodes > 1:
        raise ConfigurationError(
            f"hydra.launcher.nnodes={options.nnodes}: a sweep runs on one node\n"
            "  try: hydra/launcher=submitit_slurm for jobs on several nodes"
        )
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    is_dry = run_mode.is_dry(config)
    if not is_dry:
        launching.start_server(options)
    jobs = [_prepare(loader, config, list(each), number) for each, number in zip(job_overrides, numbers, strict=True)]
    if is_dry:
        return [_tell(job) for job in jobs]
    if watch is None:
        _log.info("Launching %d jobs, %d at a time", len(jobs), options.max_parallel_jobs)
    largest = max((job.processes for job in jobs), default=1)
    try:
        with launching.supervising(options), launching.hidden_script():
            _run_all(jobs, options.max_parallel_jobs, Slots(options.cpu_slots, largest), watch or _Log(jobs))
    except (launching.Interrupted, KeyboardInterrupt) as interruption:
        signal = interruption if isinstance(interruption, launching.Interrupted) else launching.Interrupted(2)
        _log.error("the sweep was %s", signal)
        raise SystemExit(128 + signal.number) from None
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    if watch is None:
        _summarize(jobs)
    return [job.result for job in jobs]


def _prepare(loader: ConfigLoader, config: DictConfig, overrides: list[str], number: int) -> _Job:
    """Compose a job, work out its processes, and pack it. Whatever goes wrong is that job's failure."""
    job = _Job(number, overrides)
    try:
        job.config = _compose(loader, config, overrides, number)
        job.folder = Path(job.config.hydra.sweep.dir) / job.config.hydra.sweep.subdir
        node, key = run_mode.node_of(job.config)
        if run_mode.is_dry(job.config):
            from . import dry_run

            dry_run.check_sweep(config, key)
            job.case, job.said = dry_run.describe(job.config)
            return job
        if node is not None:
            target = run_mode.planned(job.config, node, key)
            job.topology = resolve(node, target.size, source=target.source(), key=key)
            job.console = console_ranks(node.runtime.log_ranks, target.size, key)
            job.processes = target.size
        elif isinstance(run_mode.options_of(job.config).nproc_per_node, int):
            job.processes = run_mode.options_of(job.config).nproc_per_node
        job.sent = _pack(job.config)
    except Exception as error:  # noqa: BLE001 - the other jobs run
        job.error = error
    return job


def _compose(loader: ConfigLoader, config: DictConfig, overrides: list[str], number: int) -> DictConfig:
    composed = loader.load_sweep_config(config, overrides)
    chosen = composed.hydra.runtime.choices.get("hydra/launcher")
    started = config.hydra.runtime.choices.get("hydra/launcher")
    if chosen != started:
        raise ConfigurationError(
            f"the job chooses hydra/launcher={chosen}, but the sweep runs on {started} already\n"
            f"  try: hydra/launcher={chosen} on the command line"
        )
    with read_write(composed), open_dict(composed):
        composed.hydra.job.id = str(number)
        composed.hydra.job.num = number
        # From here on every process must see the same values: folders, and whatever ${now:...} and its like gave.
        interpolations.resolve_cached(composed)
        composed.hydra.sweep.dir = os.path.abspath(str(composed.hydra.sweep.dir))
        composed.hydra.sweep.subdir = str(composed.hydra.sweep.subdir)
    return composed


def _tell(job: _Job) -> JobReturn:
    """The report of a dry run, also left in the job's folder."""
    from . import dry_run

    if job.case is not None:
        sys.stdout.write(f"{job.name}\n{job.said}\n{dry_run.write(job.case, job.folder)}\n\n")
    return job.result


def _pack(config: DictConfig) -> worker.SentJob:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    script = spec.name.removesuffix(".__main__") if spec is not None else getattr(main, "__file__", None)
    if script is None:
        raise LaunchError("the jobs of a sweep run the script again, and this program is no script or module")
    is_module = spec is not None
    script = script if is_module else os.path.abspath(script)
    return worker.SentJob(script, is_module, os.getpid(), tuple(sys.argv), dict(os.environ), pickle.dumps(config))


class _Log:
    """The watch of a sweep that nobody watches: a log line for each job that starts or fails."""

    def __init__(self, jobs: list[_Job]) -> None:
        self._jobs = {job.number: job for job in jobs}

    def started(self, number: int) -> None:
        job = self._jobs[number]
        _log.info("\t%s: %d process(es)", job.name, job.processes)

    def ended(self, number: int, result: JobReturn, seconds: float) -> None:
        job = self._jobs[number]
        if job.error is not None and job.sent is not None:
            _log.error("\t%s failed after %.1f s: %s", job.name, seconds, headline(job.error))


def _run_all(jobs: list[_Job], at_a_time: int, slots: Slots, watch: Watch) -> None:
    for job in jobs:
        if job.error is not None:
            watch.ended(job.number, job.result, 0.0)
    ready = [job for job in jobs if job.error is None]
    if at_a_time == 1:
        for job in ready:
            _run(job, None, watch)
        return
    stop = threading.Event()
    with ThreadPoolExecutor(at_a_time) as pool:
        futures = [pool.submit(_run_in_slots, job, slots, watch, stop) for job in ready]
        try:
            with launching.terminable():
                _wait(futures)
        except launching.Interrupted:
            stop.set()
            launching.end_children()
            raise


def _run_in_slots(job: _Job, slots: Slots, watch: Watch, stop: threading.Event) -> None:
    try:
        with slots.take(job.processes, stop) as devices:
            if stop.is_set():
                job.error = LaunchError("not started: the sweep was interrupted")
                return
            _run(job, devices, watch, stop)
    except LaunchError as error:  # more processes than there are accelerators
        job.error = error
        watch.ended(job.number, job.result, 0.0)


def _wait(futures: list["Future[None]"]) -> None:
    """Wait in the main thread in short steps, so that a signal gets through."""
    for future in futures:
        while not future.done():
            time.sleep(0.02)
        future.result()


def _run(job: _Job, devices: str | None, watch: Watch, stop: threading.Event | None = None) -> None:
    assert job.config is not None
    assert job.sent is not None
    watch.started(job.number)
    if devices is not None:
        job.sent.environ["CUDA_VISIBLE_DEVICES"] = devices
    began = time.monotonic()
    try:
        options = run_mode.options_of(job.config)
        results = launching.run_function(options, job.processes, job.console, worker.run_sent_job, job.sent)
        job.value = _unpack(results[0].value, job.main)
        job.peak_memory = [peak for _, result in sorted(results.items()) for peak in result.peak_memory]
    except launching.WorkersFailed as error:
        cause = error.cause
        where = run_mode.place(job.topology, cause.rank) if cause.rank < job.topology.world_size else {}
        text = tell(cause, job.processes, where, job.folder / f"ranks/{cause.rank}.log")
        job.error = launching.WorkersFailed(text, cause)
    except Exception as error:  # noqa: BLE001 - the other jobs run
        job.error = error
    if not (stop and stop.is_set()):
        watch.ended(job.number, job.result, time.monotonic() - began)


class _Unpickler(pickle.Unpickler):
    """Finds the classes of the user's script while that is hidden."""

    def __init__(self, data: bytes, main: ModuleType) -> None:
        super().__init__(io.BytesIO(data))
        self._main = main

    def find_class(self, module: str, name: str) -> Any:
        """As always, but ``__main__`` is the script."""
        if module == "__main__":
            return functools.reduce(getattr, name.split("."), self._main)
        return super().find_class(module, name)


def _unpack(value: bytes | None, main: ModuleType) -> Any:
    return None if value is None else _Unpickler(value, main).load()


def _summarize(jobs: list[_Job]) -> None:
    failed = [job for job in jobs if job.error is not None]
    if not failed:
        return
    lines = [f"{len(jobs) - len(failed)} of {len(jobs)} jobs succeeded, {len(failed)} failed:"]
    for job in failed:
        assert job.error is not None
        lines.append(f"\t{job.name}: {headline(job.error)}")
        if job.folder != Path():
            lines.append(f"\t\tin {job.folder}")
    _log.error("\n".join(lines))


def headline(error: BaseException) -> str:
    """The line that says what happened: of a traceback the last one, of a death how it came, of a message the first."""
    text = message_of(error).strip().splitlines()
    deaths = [line for line in text if line.startswith("rank ") and line.endswith(", without an exception")]
    if deaths:
        return deaths[-1]
    if text and text[0].startswith("Traceback"):
        accounts = [line for line in text if not line.startswith((" ", "Traceback", "rank "))]
        return accounts[-1] if accounts else text[-1]
    return text[0] if text else "no message"
