"""Random layouts of random models: each trains as one process does, or is refused on every rank before it has trained.

More by hand: ``torchrun --standalone --nproc-per-node 8 tests/apps/fuzz.py SEED COUNT``.
"""

import json
from collections import defaultdict
from typing import Any

import pytest

from processes import ROOT, body_lines, run, torchrun

RANKS, SEED, COUNT = 4, 2, 25
TOLERANCE = 1e-5
RELATIVE = 1e-3
"""Of the largest entry of a gradient: what is wrong by a factor is found in small gradients too."""


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.timeout(300)
def test_random_layouts_train_as_one_process_or_are_refused() -> None:
    outcome = run(torchrun(RANKS, "fuzz.py", str(SEED), str(COUNT)), ROOT, deadline=280)
    told: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in body_lines(outcome):
        result = json.loads(line.removeprefix("BODY "))
        told[result["number"]].append(result)
    assert outcome.code == 0, outcome.text
    assert sorted(told) == list(range(COUNT))
    wrong = {number: results for number, results in told.items() if not _holds(results)}
    assert not wrong, json.dumps(wrong, indent=1)
    trained = sum("loss" in results[0] for results in told.values())
    assert COUNT // 3 <= trained < COUNT, "the cases should be of both kinds"


def _holds(results: list[dict[str, Any]]) -> bool:
    """Whether all ranks refused, or all were right."""
    if len(results) != RANKS:
        return False
    if all("refused" in result for result in results):
        return True
    return all(
        "loss" in result
        and result["loss"] <= TOLERANCE
        and result["gradient"] <= TOLERANCE
        and result["relative"] <= RELATIVE
        and not result["missing"]
        for result in results
    )
