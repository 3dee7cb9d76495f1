"""The examples: the same loss under every layout, guided_sampling.py the same bits, and what is refused."""

import re
import sys
from pathlib import Path

import pytest

from processes import ROOT, Outcome, clean_environment, run, torchrun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]  # eight jobs in one fixture

TRAIN = ROOT / "examples/train.py"
SAMPLE = ROOT / "examples/guided_sampling.py"
FEW = ("train.steps=8", "train.log_every=1", "model.num_layers=4")
PRESETS = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "pp", "pp_fsdp", "fsdp_pp_tp")
once = pytest.mark.xdist_group("examples")
"""For tests that share what is run once."""


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+/8 loss (\d+\.\d+)", text)]


def trained(outcome: Outcome) -> list[float]:
    assert outcome.code == 0, outcome.text
    return losses(outcome.text)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    command = [sys.executable, TRAIN, "parallelism=fsdp", *FEW]
    return trained(run(command, tmp_path_factory.mktemp("reference"), env=clean_environment()))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sweep of 4 processes a job, job i under preset i."""
    folder = tmp_path_factory.mktemp("sweep")
    command = [sys.executable, TRAIN, "-m", f"parallelism={','.join(PRESETS)}", "hydra.launcher.nproc_per_node=4", *FEW]
    outcome = run([*command, "hydra.sweep.dir=."], folder, deadline=380, env=clean_environment())
    assert outcome.code == 0, outcome.text
    return folder


@once
def test_one_process_learns(reference: list[float]) -> None:
    assert len(reference) == 8
    assert reference[0] == pytest.approx(5.55, abs=0.1)  # log(256): the first guess is uniform
    assert reference[-1] < 4.5


@once
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_matches_one_process(preset: str, reference: list[float], sweep: Path) -> None:
    found = losses((sweep / f"{PRESETS.index(preset)}/ranks/0.log").read_text())
    assert len(found) == 8
    assert found == pytest.approx(reference, abs=1e-4)


@once
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism=hsdp", "parallelism.dp_replicate=2"),
        (),
        ("parallelism=fsdp_tp", "parallelism.enable_sequence_parallel=true", "parallelism.activation_checkpointing=full"),
    ],
    ids=["hsdp", "untouched", "fsdp_tp_sp"],
)
def test_under_torchrun(layout: tuple[str, ...], reference: list[float], tmp_path: Path) -> None:
    found = trained(run(torchrun(4, TRAIN, *layout, *FEW), tmp_path))
    assert len(found) == 8, "printed on rank 0 only"
    assert found == pytest.approx(reference, abs=1e-4)


def test_two_branches_draw_the_digits_that_one_process_draws(tmp_path: Path) -> None:
    few = ("train.steps=300", "sample.steps=10")
    said = []
    for layout in ((), ("parallelism=cfg", "parallelism.inference=true")):
        command = [sys.executable, SAMPLE, *layout, *few, f"hydra.run.dir=out{len(layout)}"]
        outcome = run(command, tmp_path, deadline=180, env=clean_environment())
        assert outcome.code == 0, outcome.text
        assert (tmp_path / f"out{len(layout)}/samples.png").stat().st_size > 4000
        said += re.findall(r"agreement with the wanted classes (\S+), bits of the samples (\w+)", outcome.text)
    assert len(said) == 2, "told on rank 0 only"
    assert said[0] == said[1]
    assert float(said[0][0]) > 0.9


MOE = ROOT / "examples/moe.py"
MOE_FEW = (*FEW, "train.batch_size=8")


@pytest.mark.xdist_group("moe")
def test_a_mixture_of_experts_learns_the_same_wherever_its_experts_are(tmp_path: Path) -> None:
    reference = trained(run([sys.executable, MOE, *MOE_FEW], tmp_path, env=clean_environment()))
    assert len(reference) == 8
    assert reference[0] == pytest.approx(5.55, abs=0.1)
    assert reference[-1] < 4.7
    layouts = ["parallelism=ep,pp_fsdp,fsdp_tp", "parallelism.ep_size=2", "parallelism.enable_sequence_parallel=true"]
    command = [sys.executable, MOE, "-m", *layouts, "hydra.launcher.nproc_per_node=4", "hydra.sweep.dir=.", *MOE_FEW]
    outcome = run(command, tmp_path, deadline=300, env=clean_environment())
    assert outcome.code == 0, outcome.text
    for number in range(3):
        found = losses((tmp_path / f"{number}/ranks/0.log").read_text())
        assert found == pytest.approx(reference, abs=1e-4)


def test_asking_for_the_config_imports_no_torch(tmp_path: Path) -> None:
    outcome = run([sys.executable, "-X", "importtime", TRAIN, "--cfg", "job"], tmp_path, env=clean_environment())
    assert outcome.code == 0
    assert "dp_shard: 1" in outcome.text
    imported = [line.split("|")[-1].strip() for line in outcome.text.splitlines() if line.startswith("import time:")]
    assert "hydra_parallelism.store" in imported
    assert not [name for name in imported if name.split(".")[0] in ("torch", "numpy")]
