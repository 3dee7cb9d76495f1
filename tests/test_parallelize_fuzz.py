"""Random layouts of random models: each trains as one process does, or is refused on every rank before it has trained.

More by hand: ``torchrun --standalone --nproc-per-node 8 tests/apps/fuzz.py SEED COUNT``.
"""

import json
from collections import defaultdict
from typing import Any

import worlds
from apps import jobs

pytestmark = worlds.MARKS
TOLERANCE = 1e-5
RELATIVE = 1e-3
"""Of the largest entry of a gradient: what is wrong by a factor is found in small gradients too."""


def test_random_layouts_train_as_one_process_or_are_refused() -> None:
    ranks, count = [rank["fuzz"] for rank in worlds.reports(4)], jobs.FUZZ[1]
    told: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in (result for results in ranks for result in results):
        told[result["number"]].append(result)
    assert sorted(told) == list(range(count))
    wrong = {number: results for number, results in told.items() if not _holds(results)}
    assert not wrong, json.dumps(wrong, indent=1)
    trained = sum("loss" in results[0] for results in told.values())
    assert count // 3 <= trained < count, "the cases should be of both kinds"


def _holds(results: list[dict[str, Any]]) -> bool:
    """Whether all ranks refused, or all were right."""
    if len(results) != 4:
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
