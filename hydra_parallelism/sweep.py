"""A sweep over layouts: only those that exist, each once, every result kept, and an answer at the end.

``run`` is what ``hydra/sweeper=layouts`` does. Its state is ``results.csv`` in the sweep's folder: the same command with
``hydra.sweep.dir=`` that folder runs what has no successful row there. :func:`feasible` is for other sweepers, which choose
degrees one trial at a time.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn, configure_log
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import launch, pictures, run_mode
from .constraints import Feasible, feasible, judge, read_constraints
from .errors import ConfigurationError
from .outcome import Row, Status
from .progress import Progress
from .ranking import table
from .results import ResultsFile
from .sweep_jobs import Recorder, run_jobs
from .sweep_plan import Candidate, Plan, describe, make_plan
from .sweeper_config import Direction, LayoutsConfig, OnInvalid

__all__ = ["Feasible", "feasible", "judge", "run"]

_log = logging.getLogger(__name__)
_WIDTH_OF_A_FILE = 160


def run(
    loader: ConfigLoader, config: DictConfig, launcher: Launcher, combinations: Sequence[list[str]], given: dict[str, Any]
) -> Sequence[JobReturn]:
    """Plan, run, record and rank.

    Args:
        loader: Hydra's.
        config: The sweep's.
        launcher: Hydra's, set up.
        combinations: Overrides of each job, from the sweeper's grammar.
        given: The sweeper's own options.

    Returns:
        The results of the jobs that were run.

    Raises:
        ConfigurationError: There is nothing to run, or something that must not be run.
        SystemExit: A job failed, or a signal ended the sweep.
    """
    options = _read_options(given)
    model = read_constraints(given.get("constraints"))
    if run_mode.is_ours(config):
        launch.check(run_mode.options_of(config), run_mode.options_of(config).nnodes)
    plan = make_plan(loader, config, combinations, axes=options.axes, model=model, max_jobs=options.max_jobs)
    if run_mode.is_dry(config):
        _tell(loader, config, plan, options)
        return []
    folder = Path(str(config.hydra.sweep.dir))
    with _alone_in(folder):
        results = ResultsFile(folder)
        with _usable(folder):
            _number(plan.runnable, results.read(), contiguous=not run_mode.is_ours(config))
        _say(describe(plan))
        _refuse_invalid(plan, options)
        with _usable(folder):
            OmegaConf.save(config, folder / "multirun.yaml")
        return _run(launcher, config, plan, results, options)


def _read_options(given: dict[str, Any]) -> LayoutsConfig:
    try:
        options: LayoutsConfig = OmegaConf.to_object(  # type: ignore[assignment]
            OmegaConf.merge(OmegaConf.structured(LayoutsConfig), OmegaConf.create(given))
        )
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"hydra.sweeper is not valid: {str(error).splitlines()[0]}") from None
    if options.max_jobs is not None and options.max_jobs < 1:
        raise ConfigurationError(f"hydra.sweeper.max_jobs={options.max_jobs}: must be at least 1, or null for all")
    return options


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder: two sweeps that write one ``results.csv`` would lose each other's rows.

    Raises:
        ConfigurationError: Another sweep holds it.
    """
    with _usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)  # of the folder itself: nothing is left behind, whatever ends this process
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another sweep is writing to {folder}\n  try: hydra.sweep.dir=another/folder, or wait for it"
            ) from None
        except OSError as error:  # a file system without locks
            _log.debug("locking %s: %s", folder, error)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"hydra.sweep.dir={folder} cannot be used: {error}\n  try: another folder") from None


def _number(jobs: list[Candidate], rows: list[Row], *, contiguous: bool) -> None:
    """Give each job its number: that of its row, else the next that no row has. ``contiguous`` ones follow all rows."""
    known = {row.fingerprint: row for row in rows}
    taken = {row.job for row in rows}
    following = max(taken, default=-1) + 1
    free = (number for number in range(following + len(jobs)) if number not in taken)
    for job in jobs:
        row = known.get(job.fingerprint)
        job.is_done = row is not None and row.status is Status.ok
        if row is not None and (job.is_done or not contiguous):
            job.number = row.job
        elif contiguous:
            job.number, following = following, following + 1
        else:
            job.number = next(free)


def _tell(loader: ConfigLoader, config: DictConfig, plan: Plan, options: LayoutsConfig) -> None:
    """What would be run, and the report of each job; no folder is made."""
    from . import dry_run

    _number(plan.runnable, [], contiguous=True)
    _say(describe(plan))
    _refuse_invalid(plan, options)
    for job in plan.runnable:
        case, said = dry_run.describe(loader.load_sweep_config(config, job.overrides))
        _say(f"\n#{job.number} {job.name}\n{said}\n{dry_run.show(case)}")


def _refuse_invalid(plan: Plan, options: LayoutsConfig) -> None:
    skipped = [each for each in plan.candidates if each.reason]
    if skipped and options.on_invalid is OnInvalid.fail:
        raise ConfigurationError(
            f"{len(skipped)} of {len(plan.candidates)} combinations do not fit, and hydra.sweeper.on_invalid=fail: "
            "nothing was started\n  try: hydra.sweeper.on_invalid=skip"
        )
    if not plan.runnable:
        why = skipped[0].reason if skipped else "hydra.sweeper.constraints leave none of the layouts"
        raise ConfigurationError(f"there is nothing to run: {why}")


def _run(
    launcher: Launcher, config: DictConfig, plan: Plan, results: ResultsFile, options: LayoutsConfig
) -> Sequence[JobReturn]:
    todo = [job for job in plan.runnable if not job.is_done]
    progress = Progress(len(plan.runnable), sys.stderr)
    for job in plan.runnable:
        if job.is_done:
            progress.skip(job.number or 0, job.name)
    recorder, found = Recorder(todo, results, progress, options.objective), []
    is_over = not todo
    try:
        found = list(run_jobs(launcher, config, todo, recorder)) if todo else []
        is_over = True
    except KeyboardInterrupt:  # before or between jobs; in the middle of one the launcher sees to it
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        progress.clear()
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        _conclude(results, options)
        if not is_over:
            _say(f"the sweep is not over: {len(recorder.rows)} of {len(todo)} jobs have ended; the same command with "
                 f"hydra.sweep.dir={config.hydra.sweep.dir} runs the others")  # fmt: skip
    failed = [row for row in recorder.rows.values() if row.status is not Status.ok]
    if failed:
        raise SystemExit(1)  # the table has said why
    return found


def _conclude(results: ResultsFile, options: LayoutsConfig) -> None:
    """The ranked table of every row in the folder, and the picture of it."""
    rows = results.read()
    if not rows:
        return
    maximize = options.direction is Direction.maximize
    width = shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns
    try:
        _say(table(rows, options.objective, maximize, width))
        drawn = pictures.draw(rows, results.path.parent, options.objective, maximize)
    except ConfigurationError as error:  # the jobs have run: an objective that none returned must not hide their rows
        _say(f"{error}\n  with hydra.sweep.dir={results.path.parent} nothing runs again\nresults: {results.path}")
        return
    _say(f"results: {results.path}")
    _say(pictures.ABSENT if drawn is None else f"picture: {' and '.join(map(str, drawn))}")


def _say(text: str) -> None:
    if sys.stdout is not None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
