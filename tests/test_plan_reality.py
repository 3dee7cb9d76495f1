"""Estimates against what the training example sends and holds, on two and four gloo processes.

A few of the layouts of ``benchmarks/estimates.py``, by that script, whose whole table is in docs/plan.md.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from processes import ROOT, python, run

pytestmark = [pytest.mark.processes, pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.xdist_group("estimates")]

FEW = {
    "tp 2, sequence parallel": {"tp"},
    "pp 2, interleaved": {"pp"},
    "hsdp 2 x 2": {"dp_replicate", "fsdp"},
    "pp 2 x fsdp 2, 1F1B": {"pp", "fsdp"},
    "fsdp 4, ep 2": {"fsdp", "efsdp", "ep"},
}
"""Layout -> axes that send, one name for those with the same ranks."""


@cache
def found() -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        script = ROOT / "benchmarks" / "estimates.py"
        outcome = run(python(script, str(file), *FEW, warnings="default"), Path(folder), deadline=500)
        assert outcome.code == 0, outcome.text
        return json.loads(file.read_text())


@pytest.mark.parametrize("layout", FEW)
def test_what_is_sent_is_within_ten_percent(layout: str) -> None:
    sent = found()[layout]["sent"]
    assert set(sent) == FEW[layout]
    for axis, (estimate, counted) in sent.items():
        assert estimate == pytest.approx(counted, rel=0.1), axis


@pytest.mark.parametrize("layout", FEW)
def test_what_is_held_is_within_five_percent_and_by_the_module_exact(layout: str) -> None:
    held = found()[layout]["held"]
    assert set(held) == {"parameters", "gradients", "optimizer", "module"}
    for what, (estimate, counted) in held.items():
        assert estimate == pytest.approx(counted, rel=0.05), what
    assert held["module"][0] == held["module"][1]
