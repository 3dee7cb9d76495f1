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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Two tests at once need groups that stay together: with some pairs of pytest and pytest-xdist they do not."""
    if not session.config.getoption("loadgroup", False):  # set in the processes of pytest-xdist
        return
    for item in session.items:
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(f"pytest-xdist leaves {item.nodeid} out of its group; try: pip install 'pytest<9.2'")
