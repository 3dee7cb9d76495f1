"""Starting real processes with a deadline: a hang is a failed test, not a stalled suite."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
APPS = Path(__file__).parent / "apps"
LAUNCHER_PREFIXES = ("SLURM", "OMPI", "PMI", "PMIX", "SUBMITIT", "TORCHELASTIC", "GROUP_", "ROLE_")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a process ended: both streams together, its exit status and how long it took."""

    text: str
    code: int
    seconds: float


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without a trace of a launcher, warnings as errors in the child."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{APPS}{os.pathsep}{ROOT}", **extra}


def run(command: Sequence[str | Path], cwd: Path, *, deadline: float = 90, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a command to its end; past the deadline its whole process group is killed and the test fails."""
    began = time.monotonic()
    process = start(command, cwd, env=env)
    try:
        text, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        raise AssertionError(f"still running after {deadline} s: {command}\n{text}") from None
    return Outcome(text, process.returncode, time.monotonic() - began)


def start(command: Sequence[str | Path], cwd: Path, *, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, both streams in one pipe."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=dict(env) if env is not None else clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def python(script: str | Path, *arguments: str, warnings: str = "error") -> list[str | Path]:
    """The command that runs a script of tests/apps (or a path) as one process."""
    return [sys.executable, "-W", warnings, _path(script), *arguments]


def torchrun(processes: int, script: str | Path, *arguments: str) -> list[str | Path]:
    """The command that runs a script on several processes through the real torchrun."""
    front = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*front, _path(script), *arguments]


def _path(script: str | Path) -> Path:
    return script if isinstance(script, Path) else APPS / script


def body_lines(outcome: Outcome) -> list[str]:
    """What the task printed, one line a rank, sorted: apps print ``BODY ...`` lines."""
    return sorted(line for line in outcome.text.splitlines() if line.startswith("BODY"))
