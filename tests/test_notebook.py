"""examples/notebook.ipynb, executed in a kernel."""

import os
import sys
from pathlib import Path

import pytest

from processes import ROOT, clean_environment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.engines,
]


def test_the_notebook_runs_and_says_what_its_text_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    kernel = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=90, kernel_name="python3", resources=kernel)
    client.execute(env=clean_environment(PATH=os.environ["PATH"], IPYTHONDIR=str(tmp_path)))
    composed, resolved, plan, alone, refused = (
        "".join(out.get("text") or out["data"]["text/plain"] for out in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    assert composed == "(-1, 2)"
    assert "dp_shard=8" in resolved
    assert "tensor-parallel neighbours of rank 5: (4, 5)" in resolved
    assert "dp_shard" in plan
    assert "DeviceMesh((dp_replicate=1, fsdp=1), 'cpu'" in alone
    assert "rank 0 of 1" in alone
    assert refused.splitlines() == [
        "parallelism asks for 4 processes (world_size=4 (product of the degrees)), but nobody launched this one",
        "  try: torchrun --standalone --nproc-per-node 4 ...",
    ]
