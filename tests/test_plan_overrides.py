"""Words of the plan's command line: the short way composes what Hydra does, the app's own config, what the launcher is told."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.plan import advice, cli, overrides
from hydra_parallelism.plan.composition import Case, resolve_case
from hydra_parallelism.plan.machine import MACHINES
from hydra_parallelism.plan.overrides import compose
from hydra_parallelism.plan.shortcut import compose_plain
from hydra_parallelism.store import PRESETS, SUB_GROUPS
from processes import ROOT, run

CONF = str(ROOT / "conf")


def case(*words: str, **app: str) -> Case:
    return resolve_case(compose(words, **app))


def all_of(config: DictConfig) -> dict[str, Any]:
    """Everything that can be told from outside: values, interpolations as written, types and flags of every node."""
    found: dict[str, Any] = {"struct": OmegaConf.is_struct(config)}
    for name in ("parallelism", "world", "model"):
        found[name] = OmegaConf.to_container(config[name])
        pending = [(name, config[name])]
        while pending:
            path, node = pending.pop()
            found[f"type of {path}"] = OmegaConf.get_type(node)
            pending += [(f"{path}.{key}", inner) for key, inner in node.items_ex(False) if isinstance(inner, DictConfig)]
    for name in ("nproc_per_node", "nnodes"):
        said = OmegaConf.select(config, f"hydra.launcher.{name}")
        found[name] = {None: "auto", "auto": "auto", 1: 1}.get(said, said) if name == "nproc_per_node" else said or 1
    return found


_OPTIONS = [f"parallelism/{group}={option}" for group, options in SUB_GROUPS.items() for option in options]
# Every preset, with every machine and every option of a sub-group among them.
_PRESETS = list(zip(PRESETS, itertools.cycle(_OPTIONS), itertools.cycle(MACHINES)))
PLAIN = [
    *([f"parallelism={preset}", option, f"world={machine}", "world.nodes=3"] for preset, option, machine in _PRESETS),
    ["parallelism=hsdp", "world.nodes=16", "world.per_node=8"],
    ["parallelism.tp_size=2", "parallelism.dp_shard=-1", "parallelism.inference=true", "parallelism.world_size=null"],
    ["parallelism.context_parallel.ring_degree=2", "parallelism/context_parallel=ulysses"],
    ["parallelism.fsdp.mixed_precision=bf16", "parallelism.activation_checkpointing=2", "parallelism.tp_plan=auto"],
    ["parallelism.pipeline.schedule=Interleaved1F1B", "parallelism.activation_checkpointing=full"],
    ["world.memory_gb=79.5", "world.inter_gb_s=25", "world.nodes=null", "parallelism.runtime.timeout_s=60"],
    ["model.hidden=64", "model.gated=false", "model.tied=true", "model.kv_heads=null", "model.params=7000000000"],
    ["hydra.launcher.nproc_per_node=4", "hydra.launcher.nnodes=2", "parallelism=fsdp"],
    ["hydra.launcher.nproc_per_node=auto", "parallelism=ddp"],
]  # fmt: skip


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_the_short_way_composes_what_hydra_does(words: list[str]) -> None:
    quick = compose_plain(words)
    assert quick is not None
    assert all_of(quick) == all_of(overrides._compose_with_hydra(overrides._ROOT, words, None))


@pytest.mark.parametrize(
    "words",
    [
        ["parallelism=nope"], ["parallelism=fsdp", "parallelism=hsdp"], ["+parallelism.mine=1"], ["~parallelism.tp_plan"],
        ["parallelism.tp_size=x"], ["parallelism.tp_sise=1"], ["parallelism.context_parallel=2"], ["world.nodes=1.5"],
        ["parallelism.tp_plan={a: colwise}"], ["parallelism.runtime.log_ranks=[0,1]"], ["parallelism.pp_size=1,2"],
        ["parallelism.runtime.backend='gloo'"], ["hydra/launcher=basic"], ["hydra.run.dir=out"], ["parallelism.tp_size"],
        ["parallelism.fsdp.wrap=${x}"], ["parallelism.inference=True"], ["parallelism.pp_size=1_0"],
        ["parallelism.fsdp.wrap=nan"], ["parallelism.runtime.timeout_s=1e3"],
        ["world.memory_gb=-.5"], ["parallelism.pipeline.schedule=1F1B"],
        ["parallelism/fsdp@x=bf16"], ["model.params=007"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_rest_is_hydras(words: list[str]) -> None:
    assert compose_plain(words) is None


@pytest.mark.processes
def test_the_short_way_loads_neither_torch_nor_plugins(tmp_path: Path) -> None:
    code = (
        "import sys; from hydra_parallelism.plan.cli import main\n"
        "from hydra.core.singleton import Singleton\n"
        "status = main(['plan', *sys.argv[1:]])\n"
        "slow = ('torch', 'numpy', 'rich', 'hydra_plugins', 'hydra_parallelism.plan.price', 'hydra_parallelism.plan.drawing')\n"
        "print('LOADED', status, [name for name in slow if name in sys.modules], [c.__name__ for c in Singleton._instances])"
    )
    outcome = run(
        [sys.executable, "-W", "error", "-c", code, "parallelism=hsdp", "world.nodes=16", "world.per_node=8"], tmp_path
    )
    assert "LOADED 0 [] []" in outcome.text or "LOADED 0 [] ['ConfigStore']" in outcome.text, outcome.text
    outcome = run([sys.executable, "-W", "error", "-c", code, "+parallelism=hsdp"], tmp_path)
    assert "hydra_plugins" in outcome.text or "Plugins" in outcome.text, outcome.text  # what the first one went without


@pytest.mark.parametrize(
    ("words", "nodes", "per_node", "topology"),
    [
        (["parallelism=hsdp", "hydra.launcher.nproc_per_node=4", "hydra.launcher.nnodes=2"],
         2, 4, Topology(dp_replicate=2, dp_shard=4)),
        (["parallelism=fsdp", "hydra.launcher.nproc_per_node=3"], 1, 3, Topology(dp_shard=3)),
        (["parallelism=hsdp", "hydra.launcher.nnodes=4"], 4, 8, Topology(dp_replicate=4, dp_shard=8)),
        (["parallelism=hsdp", "hydra.launcher.nproc_per_node=2", "world.nodes=4"], 4, 2, Topology(dp_replicate=4, dp_shard=2)),
        (["parallelism=fsdp", "hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=4"],
         2, 4, Topology(dp_shard=8)),
        (["hydra.launcher.nproc_per_node=4", "+hydra.job.env_set.A=b"], 1, 4, Topology(dp_replicate=4)),
    ],
)  # fmt: skip
def test_what_the_launcher_is_told(words: list[str], nodes: int, per_node: int, topology: Topology) -> None:
    if any("submitit" in word for word in words):
        pytest.importorskip("submitit")
    found = case(*words)
    assert (found.machine.nodes, found.machine.per_node, found.topology) == (nodes, per_node, topology)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.launcher.nproc_per_node=x"], "hydra.launcher.nproc_per_node=x: must be a whole number of at least 1"),
        (["hydra.launcher.nproc_per_node=0", "hydra.launcher.nnodes=-1"],
         "hydra.launcher.nproc_per_node=0 and hydra.launcher.nnodes=-1: must be a whole number of at least 1"),
        (["hydra.launcher.nnodes=2", "world.nodes=4"],
         "world.nodes=4, but hydra.launcher.nnodes=2\n  try: world.nodes=2, or leave it out"),
        (["hydra.launcher.nproc_per_node=4", "parallelism.dp_shard=2"],
         "= 2, but hydra.launcher.nproc_per_node=4 on 1 node(s)\n  try: parallelism.dp_shard=4, or start 2 processes"),
        (["hydra.launcher.nproc_per_node=4", "parallelism.world_size=6"],
         "parallelism.world_size=6, but hydra.launcher.nproc_per_node=4 on 1 node(s)\n"
         "  try: hydra.launcher.nnodes=2, or parallelism.world_size=4"),
    ],
)  # fmt: skip
def test_a_launcher_that_does_not_fit(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        case(*words)
    assert message in str(error.value)


def test_an_app_brings_its_defaults() -> None:
    app = {"config_dir": CONF, "config_name": "config"}
    assert case(**app).config.tp_plan == "auto"  # which conf/config.yaml says
    assert case("parallelism=two_by_two", "train.lr=1", **app).topology == Topology(dp_replicate=2, dp_shard=2)
    composed = compose(["model=small", "world=dgx_a100", "world.nodes=2", "train.steps=3"], **app)
    assert (composed.config.model.num_layers, composed.config.train.steps) == (8, 3)  # the app has a node model of its own,
    assert (composed.world.nodes, composed.world.intra_gb_s) == (2, 300.0)  # and none for the machine
    assert composed.model.hidden is None
    assert case("hydra.launcher.nproc_per_node=4", **app).topology == Topology(dp_replicate=4)


def test_an_app_without_a_model_can_be_told_of_one() -> None:
    composed = compose(["model.params=7000000000", "lr=1"], str(ROOT / "tests/apps/conf"), "say")
    assert composed.model.params == 7_000_000_000
    assert "model" not in composed.config


def test_an_app_whose_parallelism_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text(
        "defaults: [parallelism@trainer.layout: fsdp, _self_]\nhydra: {callbacks: {parallelism: {node: trainer.layout}}}\n"
    )
    found = case("trainer.layout.tp_size=16", "world.nodes=2", config_dir=str(tmp_path), config_name="app")
    assert (found.key, found.topology) == ("trainer.layout", Topology(tp=16))
    assert "try trainer.layout.tp_size=8" in advice.warnings_of(found)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-name", "config"], "--config-name config is in no folder\n  try: --config-dir conf\n"),
        (["--config-dir", CONF, "--config-name", "nope"], "Cannot find primary config 'nope'"),
        (["--config-dir", f"{CONF}/model", "--config-name", "tiny"], "tiny has no node 'parallelism': choose a preset"),
        (["--config-dir", CONF, "--config-name", "config", "hydra.launcher.nproc_per_node=3"],
         "train.local_batch_size: ${parallelism.per_dp_rank:16}: 16 does not divide over dp_replicate=3"),
        (["--config-dir", CONF, "--config-name", "config", "model=nope"], "In 'config': Could not find 'model/nope'"),
        (["train.lr=3"], "  try: --config-dir conf --config-name config, if train.lr=3 is about an app's own config\n"),
    ],
)  # fmt: skip
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 1
    assert message in capsys.readouterr().err


def test_constraints_of_the_apps_sweeper_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "hydra/sweeper=layouts",
        "hydra.sweeper.constraints.num_heads=4",
        "parallelism.tp_size=8",
        "parallelism.dp_shard=2",
    ]
    assert cli.main(["plan", "--config-dir", CONF, "--config-name", "config", *words, "--format", "text"]) == 0
    told = "warning: hydra.sweeper.constraints rule this layout out: num_heads=4 does not divide by tp_size=8\n"
    assert told in capsys.readouterr().out


SHAPE = ["model.hidden=66", "model.layers=4", "model.heads=6", "model.ffn=96", "model.vocab=1000", "model.sequence=30"]


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["parallelism.tp_size=4", "parallelism.enable_sequence_parallel=true"],
         ["model.heads=6 does not divide by tp_size=4", "model.sequence=30 does not divide by tp_size=4"]),
        (["parallelism.context_parallel.ulysses_degree=4"],
         ["model.heads=6 does not divide by ulysses_degree=4", "model.sequence=30 does not divide by ulysses_degree=4"]),
        (["parallelism.dp_shard=4", "parallelism.ep_size=4", "model.experts=6"],
         ["model.experts=6 does not divide by ep_size=4"]),
        (["parallelism.pp_size=8"], ["model.layers=4 is less than the 8 stages of parallelism.pp_size=8 under 1F1B"]),
        (["parallelism.pp_size=3", "parallelism/pipeline=interleaved_1f1b"],
         ["model.layers=4 is less than the 6 stages of parallelism.pp_size=3 under Interleaved1F1B"]),
        (["parallelism.pp_size=2", "model.tied=true"],
         ["model.tied=true, but with parallelism.pp_size=2 embedding and head are in two stages and cannot be one weight; "
          "try model.tied=false"]),
    ],
)  # fmt: skip
def test_a_model_that_the_layout_cannot_split(words: list[str], reasons: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *SHAPE, *words]) == 1
    assert capsys.readouterr().err == "\n  ".join(["the model does not go with the layout:", *reasons]) + "\n"
