"""Running the jobs of a sweep with whatever launcher it has, and recording each as it ends."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from . import memory, run_mode
from .errors import ConfigurationError
from .failures import Failure, find_cause
from .multirun import headline
from .outcome import Row, Status, numbers_of, status_of
from .progress import Progress
from .ranking import objective_of
from .results import ResultsFile
from .sweep_plan import Candidate, in_one_line

__all__ = ["Recorder", "run_jobs"]

_log = logging.getLogger(__name__)
_POLL_S = 0.2


class Recorder:
    """Is told of each job as it starts and ends: keeps the progress display and ``results.csv`` up to date.

    Attributes:
        rows: What the jobs of this run came to, by number.
    """

    def __init__(
        self, jobs: Sequence[Candidate], results: ResultsFile, progress: Progress, objective: str | None = None
    ) -> None:
        self._jobs = {job.number: job for job in jobs}
        self._results, self._progress, self._objective = results, progress, objective
        self.rows: dict[int, Row] = {}

    def started(self, number: int) -> None:
        """A job starts."""
        self._progress.start(number, self._jobs[number].name)

    def ended(self, number: int, result: JobReturn, seconds: float) -> None:
        """A job has ended, well or not. What it was made of is let go: the collector that runs between jobs would look through
        the configs of all that have ended, 0.25 ms for each of them (they are in the jobs' folders).
        """
        row = self._row(number, result, seconds)
        result.cfg = result.hydra_cfg = None
        self._results.put(row)
        self.rows[number] = row
        self._progress.finish(number, row.status)
        if row.error:
            self._progress.clear()
            _log.log(logging.WARNING if row.status is Status.ok else logging.ERROR, "\t#%d: %s", number, row.error)
        if row.numbers:
            self._warn_of_objective(row)

    def _warn_of_objective(self, row: Row) -> None:
        """Say with the first numbers, and not when all jobs have run, that they cannot be ranked."""
        if any(other.numbers for other in self.rows.values() if other is not row):
            return
        try:
            objective_of([row], self._objective)
        except ConfigurationError as error:
            self._progress.clear()
            _log.warning("the jobs will not be ranked: %s", error)

    def _row(self, number: int, result: JobReturn, seconds: float) -> Row:
        job, value = self._jobs[number], result._return_value
        status, numbers, said = Status.ok, dict[str, float](), ""
        if result.status is not JobStatus.COMPLETED:
            status = status_of(value)
            said = headline(value) or type(value).__name__
        else:
            try:
                numbers = numbers_of(value)
            except ConfigurationError as error:  # the job is done all the same
                said = in_one_line(error)
        return Row(
            job=number,
            fingerprint=job.fingerprint,
            status=status,
            degrees=job.degrees,
            world=job.topology.world_size,
            numbers=numbers,
            seconds=round(seconds, 3),
            peak_memory=tuple(memory.read(result)),
            folder=str(_folder(result)),
            error=said,
            overrides=job.label,
        )


def _folder(result: JobReturn) -> Path | str:
    if result.hydra_cfg is None:
        return ""
    hydra = result.hydra_cfg.hydra
    written = OmegaConf.select(hydra, "runtime.output_dir", throw_on_missing=False)
    return Path(str(written)) if written else Path(str(hydra.sweep.dir)) / str(hydra.sweep.subdir)


def run_jobs(launcher: Launcher, config: DictConfig, jobs: Sequence[Candidate], recorder: Recorder) -> Sequence[JobReturn]:
    """Run jobs and return one result each; a failed job is a failed result and the others run.

    Ours runs several at a time and says when each starts and ends. Hydra's basic launcher gets one at a time. Any other
    launcher gets all of them, for it may run them at the same time.
    """
    overrides, numbers = [job.overrides for job in jobs], [job.number or 0 for job in jobs]
    if run_mode.is_ours(config):
        found: Sequence[JobReturn] = launcher.launch_watched(overrides, numbers, recorder)  # type: ignore[attr-defined]
        return found
    if str(config.hydra.launcher._target_).startswith("hydra._internal."):
        return [_run_one(launcher, each, number, recorder) for each, number in zip(overrides, numbers, strict=True)]
    if run_mode.is_cluster(config):
        with _watched_submitit(numbers, recorder):
            return launcher.launch(overrides, initial_job_idx=numbers[0])
    return _run_batch(launcher, overrides, numbers, recorder)


def _run_one(launcher: Launcher, overrides: list[str], number: int, recorder: Recorder) -> JobReturn:
    recorder.started(number)
    began = time.monotonic()
    try:
        [result] = launcher.launch([overrides], initial_job_idx=number)
    except Exception as error:  # noqa: BLE001 - a job that cannot be composed; the others run
        result = _failed(error)
    except SystemExit as error:  # the task leaves; in a sweep the others run
        runtime = sys.modules.get("hydra_parallelism.runtime")
        if runtime is not None:
            runtime.shutdown()  # Hydra tells no callback that this job has ended
        succeeded = error.code in (None, 0)
        result = (
            JobReturn(status=JobStatus.COMPLETED) if succeeded else _failed(SystemExit(f"left by sys.exit({error.code!r})"))
        )
    recorder.ended(number, result, time.monotonic() - began)
    return result


def _run_batch(
    launcher: Launcher, overrides: list[list[str]], numbers: Sequence[int], recorder: Recorder
) -> Sequence[JobReturn]:
    began = time.monotonic()
    for number in numbers:
        recorder.started(number)
    results = launcher.launch(overrides, initial_job_idx=numbers[0])
    for number, result in zip(numbers, results, strict=True):
        recorder.ended(number, result, time.monotonic() - began)
    return results


def _failed(error: BaseException) -> JobReturn:
    result = JobReturn(status=JobStatus.FAILED)
    result.return_value = error
    return result


@contextlib.contextmanager
def _watched_submitit(numbers: Sequence[int], recorder: Recorder) -> Iterator[None]:
    """Hear of each job as it ends. By itself its launcher waits for one after the other and gives up at the first that died."""
    import submitit

    real = submitit.AutoExecutor

    class Executor(real):  # type: ignore[misc, valid-type]
        """Gives the launcher jobs that record themselves."""

        def map_array(self, function: Any, *columns: Any) -> list["_Awaited"]:
            jobs = super().map_array(function, *columns)
            for number in numbers:
                recorder.started(number)
            waiting = _Waiting(dict(zip(numbers, jobs, strict=True)), recorder)
            return [_Awaited(number, waiting) for number in numbers]

    submitit.AutoExecutor = Executor  # type: ignore[misc]
    try:
        yield
    finally:
        submitit.AutoExecutor = real  # type: ignore[misc]


class _Waiting:
    """The jobs of one array, and what those that have ended came to."""

    def __init__(self, jobs: dict[int, Any], recorder: Recorder) -> None:
        self._open, self._recorder = jobs, recorder
        self._began = time.monotonic()
        self._results: dict[int, JobReturn] = {}

    def wait(self, number: int) -> JobReturn:
        """The result of one job; whichever others end before it are recorded on the way."""
        while number not in self._results:
            for each, job in list(self._open.items()):
                if job.done():
                    del self._open[each]
                    self._results[each] = _result_of(job)
                    self._recorder.ended(each, self._results[each], time.monotonic() - self._began)
            if number not in self._results:
                time.sleep(_POLL_S)
        return self._results[number]


class _Awaited:
    """Stands for one job in the launcher, which asks it for its results."""

    def __init__(self, number: int, waiting: _Waiting) -> None:
        self._number, self._waiting = number, waiting

    def results(self) -> list[JobReturn]:
        """One result, as if of one task."""
        return [self._waiting.wait(self._number)]


def _result_of(job: Any) -> JobReturn:
    """What the tasks of a job came to together: rank 0's value, or the failure that the others follow from."""
    try:
        tasks: list[JobReturn] = job.results()
    except Exception as error:  # noqa: BLE001 - whatever submitit says of a job that died, in several lines
        error.args = (" ".join(line.strip() for line in str(error).splitlines()[:2]),)
        return _failed(error)
    failures = [
        Failure(rank, 1, text=str(task._return_value), kind=type(task._return_value).__name__, moment=rank)
        for rank, task in enumerate(tasks)
        if task.status is not JobStatus.COMPLETED
    ]
    chosen = tasks[find_cause(failures).rank if failures else 0]
    memory.attach(chosen, [peak for task in tasks for peak in memory.read(task)])
    return chosen
