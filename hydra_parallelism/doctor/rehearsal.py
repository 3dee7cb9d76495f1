"""A real all-reduce over a few local processes, started by the library's own launcher, with an end that is certain."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from .. import world
from .findings import Finding, bad, ok

__all__ = ["all_reduce"]

_SIGN = "all-reduce:"
_NOISE = ("[", "starting ", "Traceback", "  File", "    ", "Set the environment", "Error executing job")


def all_reduce(processes: int, deadline: float) -> Iterator[Finding]:
    """Run it.

    Args:
        processes: How many.
        deadline: Seconds after which all of it is killed.
    """
    what = f"an all-reduce over {processes} local process(es)"
    text, code = _run(processes, deadline)
    if code is None:
        yield bad(
            f"{what} did not end within {deadline:g} s{_last(text)}", f"what is bad above, or --deadline {2 * deadline:g}"
        )
        return
    for line in text.splitlines():
        if line.startswith(_SIGN):
            total, ranks, backend, seconds = line.removeprefix(_SIGN).split()
            if code == 0 and float(total) == processes * (processes - 1) / 2 and int(ranks) == processes:
                yield ok(f"{what} works ({backend}, {float(seconds) * 1000:.1f} ms)")
                return
    by_hand = f"python -m hydra_parallelism.doctor.task hydra.launcher.nproc_per_node={processes}"
    yield bad(f"{what} failed with status {code}{_last(text)}", f"what is bad above; for all of the output {by_hand}")


def _run(processes: int, deadline: float) -> tuple[str, int | None]:
    """Output and exit status, ``None`` past the deadline."""
    with tempfile.TemporaryDirectory(prefix="hydra_parallelism_") as folder:
        child = subprocess.Popen(
            _command(processes, deadline, folder),
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = child.communicate(timeout=deadline)
            return text, child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the ranks are tied to it and die with it
            return _rest(child), None


def _rest(child: "subprocess.Popen[str]") -> str:
    """What a killed process had written; whoever still holds its pipe must not hold us up."""
    try:
        return child.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""


def _command(processes: int, deadline: float, folder: str) -> list[str]:
    words = [f"hydra.launcher.nproc_per_node={processes}", f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    limits = [f"parallelism.runtime.{name}={max(1.0, deadline * 0.8):g}" for name in ("timeout_s", "start_timeout_s")]
    return [sys.executable, "-m", "hydra_parallelism.doctor.task", *words, *limits]


def _environment() -> dict[str, str]:
    """Ours, without what any launcher has left: the processes of this one must not look for another's."""
    left = {name for variables in world.seen().values() for name in variables}
    left |= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left and not name.startswith(("TORCHELASTIC_", "HYDRA_PARALLELISM_"))
    }


def _last(text: str) -> str:
    """The line that says most: the last one of an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    chosen = (errors or lines)[-1:]
    return f": {chosen[0][:300]}" if chosen else ""
