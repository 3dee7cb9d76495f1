"""What every test needs: an environment in which nobody launched this process."""

import pytest

from hydra_parallelism.world import _TABLE


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests (a Slurm step, say) must not be taken for the launcher of what is tested."""
    names = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    for of in _TABLE:
        names |= {of.marker, *of.size, *of.rank, *of.local_rank, *of.local_size, *of.nnodes, *of.node_rank}
    for name in names:
        monkeypatch.delenv(name, raising=False)
