"""The rows of every target: complete, proven one by one, and what docs/interop.md says."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_parallelism.interop import ours, table
from hydra_parallelism.interop.fields import OURS_ALONE, lookup
from hydra_parallelism.topology import DERIVED_AXES
from interop_rows import CLASSES, PROOFS, Proof, changes, convert
from processes import ROOT, clean_environment

TARGETS = table.targets()
CASES = [pytest.param(name, proof, id=f"{name}-{proof.theirs}-{proof.ours}") for name in PROOFS for proof in PROOFS[name]]


@pytest.mark.parametrize(("name", "proof"), CASES)
def test_our_key_changes_their_field_and_no_other(name: str, proof: Proof) -> None:
    to, back = convert(name)
    if proof.reads:
        before, after = back(proof.base), back({**proof.base, **proof.change})
        found = changes(before, after)
        assert found.pop(proof.ours) == proof.value
        assert set(found) == proof.also
        return
    before, after = CLASSES[name](to(proof.base)), CLASSES[name](to({**proof.base, **proof.change}))
    found = changes(before, after)
    assert found.pop(proof.theirs) == proof.value
    assert set(found) <= proof.also
    ours_before, ours_after = back(before), back(after)
    wanted = ours.build(dict(_leaves({**proof.base, **proof.change})))
    assert set(changes(ours_before, ours_after)) - proof.also == {proof.ours}
    assert changes(ours_after, wanted) == {}


def _leaves(node: dict, prefix: str = "") -> list:
    known = list(ours.leaves())
    found = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        found += [(path, value)] if path in known else _leaves(value, f"{path}.")
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_every_row_has_a_proof(name: str) -> None:
    rows = [(row.theirs, row.ours) for row in TARGETS[name].fields if row.theirs is not None and row.ours is not None]
    assert [(proof.theirs, proof.ours) for proof in PROOFS[name]] == rows


@pytest.mark.parametrize("name", TARGETS)
def test_every_key_of_ours_has_its_place(name: str) -> None:
    target = TARGETS[name]
    told = {row.ours for row in target.fields}  # a row without theirs says why nothing is lost
    told |= {axis for derived in told & DERIVED_AXES.keys() for axis in DERIVED_AXES[derived]}
    for path in ours.leaves():
        has_row = path in told or ours.AXIS_OF.get(path) in told
        assert has_row or lookup(target.cannot, path) or lookup(OURS_ALONE, path), f"{path} would be dropped"
    idle = [entry for entry in target.cannot if not any(lookup([entry], path) for path in ours.leaves())]
    assert idle == []


def test_the_page_has_what_the_code_says(tmp_path: Path) -> None:
    page = ROOT / "docs/interop.md"
    copy = tmp_path / "interop.md"
    copy.write_text(page.read_text())
    table.write(copy)
    assert copy.read_text() == page.read_text(), f"python -m hydra_parallelism.interop.table {page.relative_to(ROOT)}"
    copy.write_text("no marks")
    with pytest.raises(ValueError, match=r"has no <!-- python -m .*: begin --> followed by <!-- end -->"):
        table.write(copy)


def test_every_module_of_a_target_is_in_the_table() -> None:
    package = ROOT / "hydra_parallelism/interop"
    with_target = {path.stem for path in package.glob("*.py") if "\nTARGET = " in path.read_text()}
    assert with_target == set(TARGETS) == set(PROOFS) == set(CLASSES)


def test_the_package_loads_neither_torch_nor_any_other_library() -> None:
    modules = ", ".join(f"hydra_parallelism.interop.{name}" for name in table.MODULES)
    code = f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean_environment())
    assert child.returncode == 0, child.stderr
    assert not {"torch", "numpy", *(target.library for target in TARGETS.values())} & set(child.stdout.split())
    interop = importlib.import_module("hydra_parallelism.interop")
    assert interop.__all__ == sorted(interop.__all__) == dir(interop)
    assert all(getattr(interop, name).__name__ == name for name in interop.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'to_nowhere'"):
        _ = interop.to_nowhere
