"""docs/plan.md: its report and its table are what the code says. Its commands are run by test_docs.py."""

import re
import shlex

import pytest

from hydra_parallelism.plan import cli
from hydra_parallelism.plan.machine import MACHINES, MachineConfig
from processes import ROOT

PAGE = (ROOT / "docs/plan.md").read_text()
COLUMNS = ("per_node", "memory_gb", "intra_gb_s", "inter_gb_s", "tflops")


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    block, *_ = re.findall(r"```console\n\$ hydra-parallelism (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert cli.main(shlex.split(block[0])) == 0
    assert capsys.readouterr().out == block[1]


def test_the_machines() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(MACHINES)
    for name, row in rows:
        numbers, source = MACHINES[name]
        machine = vars(MachineConfig(**numbers))
        assert row.split(" | ") == [*(f"{machine[column]:g}" for column in COLUMNS), source]
