"""Transformers' own models with their own plans, and examples/finetune.py: each layout trains as one process does."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from processes import APPS, ROOT, Outcome, body_lines, clean_environment, run, torchrun

sys.path.insert(0, str(APPS))

from layouts import LLAMA_LAYOUTS, LLAMAS

pytest.importorskip("transformers", reason="the extras `test` and `examples` install it")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
TOLERANCE = 1e-5
FINETUNE = ROOT / "examples/finetune.py"
FEW = ("train.steps=6", "train.log_every=1", "hydra.run.dir=out")


@cache
def results() -> dict[tuple[str, ...], dict[str, Any]]:
    """What tests/apps/llamas.py says, run once."""
    outcome = run(torchrun(4, "llamas.py"), ROOT, deadline=600)
    assert outcome.code == 0, outcome.text
    found = [json.loads(line.removeprefix("BODY ")) for line in body_lines(outcome)]
    return {tuple(result.pop("case")): result for result in found}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", LLAMAS)
@pytest.mark.parametrize("layout", LLAMA_LAYOUTS)
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
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2))
    in_order = [unit.name for unit in find_units(model, "auto", "parallelism")]
    assert in_order == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    # Registered the other way round: the plan knows that the head reads what the base model writes, and that tokens come first.
    head, base = model._modules.pop("lm_head"), model._modules.pop("model")
    base._modules["embed_tokens"] = base._modules.pop("embed_tokens")
    model._modules |= {"lm_head": head, "model": base}
    assert [unit.name for unit in find_units(model, "auto", "parallelism")] == in_order


def losses(outcome: Outcome) -> list[float]:
    assert outcome.code == 0, outcome.text
    return [float(number) for number in re.findall(r"step \d+/6 loss (\d+\.\d+)", outcome.text)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 as save_pretrained() writes it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    folder = tmp_path_factory.mktemp("qwen3")
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("preset", "start"),
    [("fsdp_tp", "llm=llama"), ("pp_fsdp", "checkpoint")],
)
def test_fine_tuning_matches_one_process(preset: str, start: str, checkpoint: Path, tmp_path: Path) -> None:
    model = f"checkpoint={checkpoint}" if start == "checkpoint" else start
    alone = losses(run([sys.executable, FINETUNE, "parallelism=single", model, *FEW], tmp_path, env=clean_environment()))
    found = losses(run(torchrun(4, FINETUNE, f"parallelism={preset}", model, *FEW), tmp_path, deadline=240))
    assert len(found) == 6, "printed on rank 0 only"
    assert found == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0]


def test_a_model_with_fewer_tokens_than_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetuning

    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    cfg = OmegaConf.create({"checkpoint": None, "train": {"seed": 0}, "llm": {"model_type": "llama", **sizes}})
    with pytest.raises(ValueError, match="the model knows 100 tokens, and the text is made of 256 different bytes"):
        finetuning.build(cfg)


def test_asking_for_the_config_imports_no_torch(tmp_path: Path) -> None:
    outcome = run(
        [sys.executable, "-X", "importtime", FINETUNE, "--cfg", "job", "llm=qwen3"], tmp_path, env=clean_environment()
    )
    assert outcome.code == 0
    assert "model_type: qwen3" in outcome.text
    imported = [line.split("|")[-1].strip() for line in outcome.text.splitlines() if line.startswith("import time:")]
    assert not [name for name in imported if name.split(".")[0] in ("torch", "numpy", "transformers")]
