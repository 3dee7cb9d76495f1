"""hydra-zen: configs that it builds, and its ``launch`` in place of ``@hydra.main``."""

from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra_zen import builds, instantiate, launch, make_config, store, to_yaml, zen
from hydra_zen.typing import Builds

from apps._app import HYDRA
from hydra_parallelism import ContextParallelConfig, ParallelismConfig, current, parallel_context, resolve
from processes import body_lines, python, run

LAYOUT = [
    f"hydra_parallelism.config.{part}Config"
    for part in ("Parallelism", "ContextParallel", "FSDP", "Pipeline", "Runtime", "Simulate")
]
# On Hydra 1.4 hydra-zen 0.17 stores the config of every launch under one name and makes callbacks without its whitelist.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ConfigStore config 'zen_launch.yaml' is already registered"),
    pytest.mark.filterwarnings(r"ignore:hydra.utils.instantiate\(\) resolved _target_='hydra_parallelism.callback"),
]
MAKES_LAYOUTS = {name: value if name == "version_base" else [*value, *LAYOUT] for name, value in HYDRA.items()}


def built() -> type[Builds[type[ParallelismConfig]]]:
    return builds(ParallelismConfig, populate_full_signature=True)


def test_a_built_config_is_ours_again() -> None:
    config = built()(dp_shard=2, tp_size=2, context_parallel=builds(ContextParallelConfig, ring_degree=2))
    assert "dp_shard: 2" in to_yaml(config)
    made = instantiate(config)
    assert resolve(made, 8) == resolve(ParallelismConfig(dp_shard=2, tp_size=2, context_parallel=made.context_parallel), 8)
    assert made.context_parallel.ring_degree == 2


def test_the_task_that_zen_wraps_gets_the_config() -> None:
    def task(parallelism: ParallelismConfig, lr: float) -> tuple[int, float]:
        with parallel_context(parallelism) as context:
            return context.topology.fsdp, lr

    config = make_config(parallelism=built()(dp_shard=-1), lr=0.5)
    assert zen(task)(instantiate(config)) == (1, 0.5)


def test_launch_runs_a_job_with_a_preset_and_its_context(tmp_path: Path) -> None:
    job = launch(
        make_config("parallelism", hydra_defaults=["_self_", {"parallelism": "fsdp"}], lr=0.5),
        lambda config: (current().topology.fsdp, config.lr),
        overrides=[f"hydra.run.dir={tmp_path}/run", "lr=0.25"],
        **HYDRA,
    )
    assert job.return_value == (1, 0.25)
    assert (tmp_path / "run/.hydra/parallelism.yaml").exists()


def test_stored_layouts_are_chosen_by_name(tmp_path: Path) -> None:
    mine = store(group="layout")
    mine(built()(dp_shard=-1), name="shards")
    store.add_to_hydra_store(overwrite_ok=True)
    job = launch(
        make_config("layout", hydra_defaults=["_self_", {"layout": "shards"}]),
        lambda config: instantiate(config.layout).dp_shard,
        overrides=[f"hydra.run.dir={tmp_path}/run"],
        **MAKES_LAYOUTS,
    )
    assert job.return_value == -1


@pytest.mark.processes
def test_launch_starts_the_processes_that_a_layout_asks_for(tmp_path: Path) -> None:
    outcome = run(python("zen_app.py", warnings="default"), tmp_path)
    assert outcome.code == 0, outcome.text
    assert body_lines(outcome) == ["BODY rank 0 sum 1", "BODY rank 1 sum 1"]
    assert "starting 2 processes" in outcome.text


def test_the_compose_api_and_a_context_in_a_test() -> None:
    version = {name: value for name, value in HYDRA.items() if name == "version_base"}
    with initialize(config_path=None, **version):
        config = compose(overrides=["+parallelism=fsdp", "+share=${parallelism.per_dp_rank:8}"])
    with parallel_context(config.parallelism) as context:
        assert (context.topology.fsdp, config.share) == (1, 8)
        assert current() is context
