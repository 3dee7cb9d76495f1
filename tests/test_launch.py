"""A plain run that starts its own processes: every way to start a script, failures, signals, restarts."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import APPS, Outcome, body_lines, clean_environment, python, run, start, torchrun

pytestmark = pytest.mark.processes

FOUR = ("parallelism=hsdp", "parallelism.dp_replicate=2", "parallelism.dp_shard=2")
TWO = ("parallelism=fsdp", "parallelism.dp_shard=2")


def ranks_said(outcome: Outcome) -> list[int]:
    assert outcome.code == 0, outcome.text
    return sorted(int(line.split()[2]) for line in body_lines(outcome))


def the_folder(cwd: Path) -> Path:
    """The one output folder of a run."""
    folders = list(cwd.glob("outputs/*/*"))
    assert len(folders) == 1, folders
    return folders[0]


def alive(marker: str) -> list[str]:
    """Command lines of running processes that hold a marker."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


def gone_within(seconds: float, marker: str) -> bool:
    until = time.monotonic() + seconds
    while alive(marker):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_a_plain_run_becomes_as_many_processes_as_it_asks_for(tmp_path: Path) -> None:
    outcome = run(python("fate.py", *FOUR, warnings="default"), tmp_path)
    assert ranks_said(outcome) == [0], "rank 0 alone has the console"
    folder = the_folder(tmp_path)
    assert [path.name for path in sorted(folder.glob("ranks/*"))] == ["0.log", "1.log", "2.log", "3.log"]
    assert len(list(tmp_path.glob("**/.hydra"))) == 1
    assert {path.name for path in (folder / ".hydra").iterdir()} == {
        "config.yaml", "hydra.yaml", "overrides.yaml", "parallelism.txt", "parallelism.yaml"
    }  # fmt: skip
    assert outcome.text.count("at work") == outcome.text.count("printed") == 1
    assert outcome.text.count("AFTER main") == 1, "code after main() runs in the processes, not in their parent"
    flags = f"--no-python {sys.executable} -W default"
    command = f"torchrun --standalone --nproc-per-node 4 {flags} {APPS / 'fate.py'} {' '.join(FOUR)}"
    assert outcome.text.count(f"starting 4 processes (world_size=4 (product of the degrees)), as would: {command}\n") == 1
    assert "[rank 3 dp_replicate=1 dp_shard=1][__main__][INFO] - at work" in (folder / "ranks/3.log").read_text()
    assert "printed" in (folder / "ranks/3.log").read_text()
    assert (folder / "fate.log").read_text().count("at work") == 1


def test_the_launchers_number_of_processes(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism=fsdp", "hydra.launcher.nproc_per_node=2"), tmp_path)
    assert ranks_said(outcome) == [0, 1]
    assert "[dp_shard=2]" in outcome.text


def test_one_process_stays_this_one(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism=fsdp"), tmp_path)
    assert ranks_said(outcome) == [0]
    assert "starting" not in outcome.text
    assert not (the_folder(tmp_path) / "ranks").exists()


def test_an_explicit_other_launcher_turns_it_off(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism.tp_size=2", "hydra/launcher=basic"), tmp_path)
    assert outcome.code == 1
    assert "parallelism asks for 2 processes" in outcome.text
    assert not body_lines(outcome)


def test_chosen_ranks_have_the_console(tmp_path: Path) -> None:
    outcome = run(python("fate.py", *FOUR, "parallelism.runtime.log_ranks=[0,3]"), tmp_path)
    assert ranks_said(outcome) == [0, 3]
    assert outcome.text.count("[rank 3 dp_replicate=1 dp_shard=1][__main__][INFO] - at work") == 1
    assert outcome.text.count("at work") == 2
    wrong = run(python("fate.py", *FOUR, "parallelism.runtime.log_ranks=[9]", "hydra.run.dir=wrong"), tmp_path)
    assert wrong.code == 1
    assert "parallelism.runtime.log_ranks=[9]: must be 'all' or ranks between 0 and 3" in wrong.text


def test_degrees_that_do_not_fit_start_nothing(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism.dp_shard=3", "hydra.launcher.nproc_per_node=4"), tmp_path)
    assert outcome.code == 1
    assert outcome.text.count("= 3, but hydra.launcher.nproc_per_node=4") == 1
    assert "starting" not in outcome.text
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("options", ["nproc_per_node=0", "nproc_per_node=many", "monitor_interval=0", "nnodes=2"])
def test_launcher_options_that_cannot_work(options: str, tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism=fsdp", f"hydra.launcher.{options}"), tmp_path)
    assert outcome.code == 1
    assert f"hydra.launcher.{options.split('=')[0]}=" in outcome.text
    assert "Traceback" not in outcome.text


# --- ways to start


PACKAGE = """
from typing import Any
from dataclasses import dataclass
import hydra, os
from hydra.core.config_store import ConfigStore
from hydra_parallelism import WithParallelism
import hydra_parallelism
kw = ({"version_base": None} if hydra.__version__.startswith("1.3")
      else {"execution_whitelist": ["hydra_parallelism.callback.ParallelismCallback"]})

@dataclass
class Config(WithParallelism):
    note: str = ""

ConfigStore.instance().store(name="config", node=Config)

@hydra.main(config_path=None, config_name="config", **kw)
def main(config: Config) -> None:
    context = hydra_parallelism.current()
    os.write(1, f"BODY rank {context.rank} note {config.note}\\n".encode())

if __name__ == "__main__":
    main()
"""
ALL = "parallelism.runtime.log_ranks=all"


@pytest.mark.parametrize("way", ["module", "console_script", "path_with_spaces", "interpreter_flags"])
def test_every_way_to_start(way: str, tmp_path: Path) -> None:
    home = tmp_path / ("a path with spaces" if way == "path_with_spaces" else "home")
    (home / "pkg").mkdir(parents=True)
    (home / "pkg/__init__.py").touch()
    (home / "pkg/train.py").write_text(PACKAGE)
    tool = home / "tool"
    search = f"import sys\nsys.path.insert(0, {str(home)!r})\n"
    tool.write_text(f"#!{sys.executable}\n{search}from pkg.train import main\nsys.exit(main())\n")
    tool.chmod(0o755)
    commands: dict[str, list[str | Path]] = {
        "module": [sys.executable, "-m", "pkg.train"],
        "console_script": [tool],
        "path_with_spaces": [sys.executable, home / "pkg/train.py"],
        "interpreter_flags": [sys.executable, "-X", "utf8", "-W", "error", home / "pkg/train.py"],
    }
    outcome = run([*commands[way], "parallelism=hsdp", "hydra.launcher.nproc_per_node=2", "note=a b"], home)
    assert ranks_said(outcome) == [0]
    assert "BODY rank 0 note a b" in outcome.text
    assert len(list(the_folder(home).glob("ranks/*.log"))) == 2


def test_a_program_from_standard_input_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-", "parallelism.dp_shard=2"]
    process = subprocess.run(command, input=PACKAGE, cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert process.returncode == 1
    assert "cannot be started again for each rank" in process.stderr


def test_local_rank_on_the_command_line_is_tolerated(tmp_path: Path) -> None:
    for spelling in (["--local-rank=0"], ["--local_rank", "0"]):
        outcome = run([*python("fate.py"), *spelling, "hydra.run.dir=out"], tmp_path)
        assert ranks_said(outcome) == [0]


# --- failures


@pytest.mark.parametrize(
    ("fate", "code", "text"),
    [
        ("raise", 1, "ValueError: boom-2"),
        ("exit", 3, "left with exit code 3, without an exception"),
        ("quit", 4, ", without an exception"),
        ("kill", 1, "was killed by SIGKILL, without an exception"),
        ("word", 1, "a last word\nrank 1 of 2"),
        ("base", 1, "GeneratorExit: base-1"),
        ("mute", 1, "Mute: <exception str() failed>"),
    ],
)
def test_the_first_failure_is_the_last_thing_on_the_console(fate: str, code: int, text: str, tmp_path: Path) -> None:
    host = os.uname().nodename
    layout, rank, who = TWO, 1, f"rank 1 of 2 on {host} (dp_shard=1)"
    if fate == "raise":
        layout, rank, who = FOUR, 2, f"rank 2 of 4 on {host} (dp_replicate=1 dp_shard=0)"
    outcome = run(python("fate.py", *layout, f"rank={rank}", f"fate={fate}", warnings="default"), tmp_path)
    assert outcome.code == code or (fate == "quit" and outcome.code == 1), outcome.text  # the agent may end it on its way
    last = "\n".join(outcome.text.splitlines()[-15:])
    assert text in last
    assert who in last
    assert f"its log: {the_folder(tmp_path)}/ranks/{rank}.log" in last
    assert "Connection closed" not in outcome.text, "the echo of another rank"
    assert "ChildFailedError" not in outcome.text
    if fate == "raise":
        assert outcome.text.count("boom-2") == 1
        assert "boom-2" in (the_folder(tmp_path) / "ranks/2.log").read_text()


def test_rank_0_may_be_the_one(tmp_path: Path) -> None:
    outcome = run(python("fate.py", *TWO, "fate=raise", "rank=0"), tmp_path)
    assert outcome.code == 1
    assert outcome.text.count("ValueError: boom-0") == 1
    assert "rank 0 of 2 on" in outcome.text.splitlines()[-2]


def test_a_rank_that_ignores_sigterm_does_not_hold_up_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = run(python("fate.py", *TWO, "fate=raise", "rank=1", "ignore=true"), tmp_path)
    assert outcome.code == 1
    assert outcome.text.count("ValueError: boom-1") == 1
    assert time.monotonic() - began < 25, "torch's agent waits for half a minute"


@pytest.mark.parametrize("moment", [0.05, 0.4, 1.5])
def test_ctrl_c_while_it_is_starting(moment: float, tmp_path: Path) -> None:
    process = start(python("fate.py", *TWO, "fate=sleep", f"+marker={tmp_path.name}"), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("starting 2 processes")
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 130, text
    assert "2 processes ended by SIGINT" in text
    # A process that is still importing may say KeyboardInterrupt, or what became of the import that it tore apart (OmegaConf's
    # clean-up has raised an AttributeError): none of that is a rank that failed, or an error of ours.
    assert not re.search(r"rank \d of 2 on", text), text
    raised_at = re.findall(r'File "([^"]*)", line \d+, in .*\n(?:    .*\n)*?(?=\S*Error)', text)
    assert not [file for file in raised_at if "hydra_parallelism/" in file], text
    assert gone_within(5, f"+marker={tmp_path.name}")


def test_an_error_before_the_job_is_told_too(tmp_path: Path) -> None:
    broken = "import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('no such wheel')\n"
    (tmp_path / "app.py").write_text(broken + PACKAGE)
    outcome = run([sys.executable, tmp_path / "app.py", "parallelism.dp_shard=2"], tmp_path)
    assert outcome.code == 1
    assert "ImportError: no such wheel" in outcome.text
    assert "rank 1 of 2" in outcome.text


@pytest.mark.parametrize(
    ("number", "code", "limit"), [(signal.SIGINT, 130, 5), (signal.SIGTERM, 143, 5), (signal.SIGKILL, -9, 10)]
)
def test_signals_end_everything(number: signal.Signals, code: int, limit: float, tmp_path: Path) -> None:
    marker = f"+marker={tmp_path.name}"
    process = start(python("fate.py", *TWO, "fate=sleep", marker), tmp_path)
    assert process.stdout is not None
    for line in process.stdout:  # until it trains
        if line.startswith("BODY"):
            break
    assert len(alive(marker)) == 3
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert gone_within(limit, marker), alive(marker)
    text, _ = process.communicate(timeout=10)
    assert process.returncode == code
    if number != signal.SIGKILL:
        assert f"2 processes ended by {number.name}" in text
        assert "Traceback" not in text


def test_restarts_keep_the_folder(tmp_path: Path) -> None:
    command = python("fate.py", "parallelism=fsdp", "hydra.launcher.nproc_per_node=2", "hydra.launcher.max_restarts=1")
    outcome = run([*command, "fate=raise", "rank=1", "once=true", "hydra.run.dir=outputs/day/${now:%H-%M-%S}"], tmp_path)
    assert outcome.code == 0, outcome.text
    log = (the_folder(tmp_path) / "ranks/1.log").read_text()
    assert "boom-1" in log
    assert log.count("at work") == 2


def test_a_log_dir_of_ones_own_keeps_runs_apart(tmp_path: Path) -> None:
    command = python("fate.py", "parallelism=fsdp", "hydra.launcher.nproc_per_node=2", "hydra.launcher.log_dir=logs")
    first = run([*command, "fate=raise", "rank=1", "hydra.run.dir=a"], tmp_path)
    assert "ValueError: boom-1" in first.text
    second = run([*command, "fate=exit", "rank=0", "hydra.run.dir=b"], tmp_path)
    assert "rank 0 of 2" in second.text
    assert "boom-1" not in second.text
    assert len(list(tmp_path.glob("logs/*/attempt_0/1/stderr.log"))) == 2


def test_no_standard_streams(tmp_path: Path) -> None:
    parts = [str(part) for part in python("say.py", "parallelism.dp_shard=2", "hydra.run.dir=out", warnings="ignore")]
    outcome = run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *parts], tmp_path)
    assert outcome.code == 0, outcome.text
    assert len(list(tmp_path.glob("out/ranks/*.log"))) == 2


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    env = clean_environment(TMPDIR=str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert ranks_said(run(python("say.py", "parallelism.dp_shard=2", ALL), tmp_path, env=env)) == [0, 1]
    assert list((tmp_path / "tmp").iterdir()) == []


# --- launched by torchrun


def test_late_ranks_share_one_folder_and_one_time(tmp_path: Path) -> None:
    env = clean_environment(DELAY="1")
    outcome = run(torchrun(4, "say.py", "+at='${now:%S}'", "lr='${now:%S}.5'"), tmp_path, env=env)
    assert ranks_said(outcome) == [0, 1, 2, 3]
    assert len(list(the_folder(tmp_path).glob("ranks/*.log"))) == 4
    assert len({line.split("lr ")[1] for line in body_lines(outcome)}) == 1, "cached resolvers give rank 0's value"


def test_torchrun_restarts_in_the_same_folder(tmp_path: Path) -> None:
    command = torchrun(2, "fate.py", "fate=raise", "rank=1", "once=true", "hydra.run.dir=outputs/day/${now:%H-%M-%S}")
    outcome = run([*command[:4], "--max-restarts=1", *command[4:]], tmp_path)
    assert outcome.code == 0, outcome.text
    assert (the_folder(tmp_path) / "ranks/1.log").read_text().count("at work") == 2


def test_torchruns_own_report_names_the_cause(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "fate.py", *FOUR, "fate=raise"), tmp_path)
    assert outcome.code == 1
    root = outcome.text.split("Root Cause")[1]
    assert "boom-2" in root
    assert "rank      : 2" in root


def test_a_sweep_in_every_rank_is_refused(tmp_path: Path) -> None:
    outcome = run(torchrun(2, "say.py", "-m", "lr=1,2"), tmp_path)
    assert outcome.code == 1
    assert not body_lines(outcome)
    assert outcome.text.count("a sweep starts the processes of its jobs itself") == 1
    assert re.search(r"try: python \S*say.py -m lr=1,2 hydra/launcher=torchrun hydra.launcher.nproc_per_node=2", outcome.text)
    assert not (tmp_path / "multirun").exists()


# --- two nodes


def test_two_agents_on_one_rendezvous(tmp_path: Path) -> None:
    """Two agents of this machine stand for two nodes with a shared file system."""
    port = 29000 + os.getpid() % 900
    front = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    front += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "--rdzv-conf=is_host={host}", "--local-addr=127.0.0.1"]
    agents = []
    for host in (1, 0):
        command = [part.format(host=host) for part in front] + [str(APPS / "fate.py"), "parallelism=hsdp"]
        agents.append(start(command, tmp_path))
    try:
        texts = [agent.communicate(timeout=90)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert sum(text.count("BODY") for text in texts) == 1
    assert "dp_replicate=2 * dp_shard=2 = 4 process(es) on 2 nodes" in "".join(texts)
    assert len(list(the_folder(tmp_path).glob("ranks/*.log"))) == 4


NAMESPACES = ("hpx", "hpy")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs root and iproute2"
)
def test_two_hosts_in_network_namespaces(tmp_path: Path) -> None:
    script = Path(__file__).parent / "clusters/two_hosts"
    subprocess.run([script, "up"], check=True, timeout=30)
    try:
        agents = []
        for name in NAMESPACES:
            inner = f"hostname {name}; exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 "
            inner += f"--rdzv-backend c10d --rdzv-endpoint hpx:29500 --rdzv-id j {APPS / 'fate.py'} parallelism=hsdp"
            agents.append(start(["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", inner], tmp_path))
        try:
            texts = [agent.communicate(timeout=120)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    finally:
        subprocess.run([script, "down"], check=True, timeout=30)
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert sum(text.count("BODY") for text in texts) == 1
    folder = the_folder(tmp_path)
    assert len(list(folder.glob("ranks/*.log"))) == 4
    record = (folder / ".hydra/parallelism.yaml").read_text()
    assert record.count("host: hpx") == record.count("host: hpy") == 2
