"""Transformers' own models with their own plans, and examples/finetune.py: each layout trains as one process does."""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import worlds
from apps.layouts import llama_runs
from processes import ROOT, clean_environment, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(worlds.DEADLINE)]
TOLERANCE = 1e-5
FINETUNE = ROOT / "examples/finetune.py"
SIZES = {"vocab_size": 256, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
FEW = ("train.steps=6", "train.log_every=1")


@cache
def results() -> dict[tuple[str, ...], dict[str, Any]]:
    """What tests/apps/llamas.py has found."""
    found = [dict(result) for result in worlds.reports(4)[0]["llamas"]]
    return {tuple(result.pop("case")): result for result in found}


@pytest.mark.engines
@pytest.mark.xdist_group("worlds")
@pytest.mark.parametrize(
    ("layout", "model", "optimizer"), [(layout, model, optimizer) for layout, _, model, optimizer in llama_runs()]
)
def test_a_layout_trains_as_one_process(layout: str, model: str, optimizer: str) -> None:
    result = results()[layout, model, optimizer]
    if layout.startswith("pp") and model == "llama_tied":
        assert "lm_head.weight (stage 1) are one parameter" in result["refused"]
        assert "Transformers: tie_word_embeddings=False" in result["refused"]
        return
    assert "refused" not in result, result["refused"]
    assert result["all"], "the stages together hold each parameter once"
    assert result["clipped"], "the norms are large enough for clipping to matter"
    assert {name: result[name] for name in ("loss", "norm", "weights") if not result[name] <= TOLERANCE} == {}, result


def test_units_run_in_the_order_of_the_pipeline_plan_of_the_model() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hydra_parallelism.parallelize.units import find_units

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(num_attention_heads=2, vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2)
        )
    in_order = [unit.name for unit in find_units(model, "auto", "parallelism")]
    assert in_order == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    # Registered the other way round: the plan knows that the head reads what the base model writes, and that tokens come first.
    head, base = model._modules.pop("lm_head"), model._modules.pop("model")
    base._modules["embed_tokens"] = base._modules.pop("embed_tokens")
    model._modules |= {"lm_head": head, "model": base}
    assert [unit.name for unit in find_units(model, "auto", "parallelism")] == in_order


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"step \d+/6 loss (\d+\.\d+)", text)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    command = [sys.executable, FINETUNE, "parallelism=single", *FEW]
    outcome = run(command, tmp_path_factory.mktemp("alone"), deadline=380, env=clean_environment())
    assert outcome.code == 0, outcome.text
    return losses(outcome.text)


@pytest.mark.xdist_group("finetune")
def test_fine_tuning_learns(alone: list[float]) -> None:
    assert len(alone) == 6
    assert alone[0] == pytest.approx(5.55, abs=0.1)  # log(256): the first guess is uniform
    assert alone[-1] < alone[0] - 0.3


@pytest.mark.xdist_group("finetune")
def test_fine_tuning_matches_one_process(alone: list[float], tmp_path: Path) -> None:
    command = [sys.executable, FINETUNE, "-m", "parallelism=fsdp_tp,pp_fsdp", "hydra.launcher.nproc_per_node=4", *FEW]
    outcome = run([*command, "hydra.sweep.dir=."], tmp_path, deadline=380, env=clean_environment())
    assert outcome.code == 0, outcome.text
    for number in range(2):
        found = losses((tmp_path / f"{number}/ranks/0.log").read_text())
        assert len(found) == 6
        assert found == pytest.approx(alone, abs=1e-4)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's function that makes the model."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetuning

    def built(checkpoint: Path | None = None, **llm: Any) -> Any:
        folder = None if checkpoint is None else str(checkpoint)
        return finetuning.build(OmegaConf.create({"checkpoint": folder, "train": {"seed": 0}, "llm": {**SIZES, **llm}}))

    return built


def test_fine_tuning_starts_from_a_checkpoint(build: Callable[..., Any], tmp_path: Path) -> None:
    saved = build(model_type="qwen3", tie_word_embeddings=True)
    saved.save_pretrained(tmp_path)
    loaded = build(tmp_path, model_type="llama")
    assert type(loaded) is type(saved)
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    assert all((value == saved.state_dict()[name]).all() for name, value in loaded.state_dict().items())


def test_a_model_with_fewer_tokens_than_bytes_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="the model knows 100 tokens, and the text is made of 256 different bytes"):
        build(model_type="llama", vocab_size=100)


def test_asking_for_the_config_imports_no_torch(tmp_path: Path) -> None:
    outcome = run(
        [sys.executable, "-X", "importtime", FINETUNE, "--cfg", "job", "llm=qwen3"], tmp_path, env=clean_environment()
    )
    assert outcome.code == 0
    assert "model_type: qwen3" in outcome.text
    imported = [line.split("|")[-1].strip() for line in outcome.text.splitlines() if line.startswith("import time:")]
    assert not [name for name in imported if name.split(".")[0] in ("torch", "numpy", "transformers")]
