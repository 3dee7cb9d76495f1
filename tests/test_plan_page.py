"""docs/plan.md: its commands run, its report and its table are what the code says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from hydra_parallelism.plan import cli
from hydra_parallelism.plan.machine import MACHINES, MachineConfig
from processes import ROOT, run

PAGE = (ROOT / "docs/plan.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
COLUMNS = ("per_node", "memory_gb", "intra_gb_s", "inter_gb_s", "tflops")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("hydra-parallelism ")])
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command.split(" > ")[0])[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("python examples/")])
def test_commands_of_an_app(command: str, tmp_path: Path) -> None:
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    outcome = run([sys.executable, *shlex.split(command)[1:]], tmp_path)
    assert outcome.code == 0, outcome.text
    assert outcome.text.count("dry run, nothing is started") == (2 if " -m " in command else 1)


def test_every_command_is_one_of_those() -> None:
    assert all(each.startswith(("hydra-parallelism ", "python examples/")) for each in COMMANDS)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```console\n\$ hydra-parallelism (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert cli.main(shlex.split(block[0])) == 0
    assert capsys.readouterr().out == block[1]


def test_the_machines() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(MACHINES)
    for name, row in rows:
        numbers, source = MACHINES[name]
        machine = vars(MachineConfig(**numbers))
        assert row.split(" | ") == [*(f"{machine[column]:g}" for column in COLUMNS), source]
