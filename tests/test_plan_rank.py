"""``plan --rank``: a step's time against numbers worked by hand, the order, the limit, and what is refused."""

import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.config import FSDPConfig, MixedPrecision, ParallelismConfig
from hydra_parallelism.plan import cli
from hydra_parallelism.plan.duration import DATA_AXES, duration_of
from hydra_parallelism.plan.machine import MachineConfig, read_machine
from hydra_parallelism.plan.memory import memory_of
from hydra_parallelism.plan.module import build, of_module
from hydra_parallelism.plan.rank import rank
from hydra_parallelism.plan.traffic import traffic
from processes import ROOT
from test_plan_price import LLAMA_3_8B, SMALL, case, model

LLAMA = [f"model.{name}={value}" for name, value in LLAMA_3_8B.items()] + ["model.batch=512", "model.micro_batch=1"]
RANK = ["plan", "--rank", "world.nodes=8", "parallelism/fsdp=bf16", "parallelism.activation_checkpointing=full", *LLAMA]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_computing_is_counted_by_hand() -> None:
    """A token meets 192 + 384 numbers a block and 256 of the head, 6 operations each; attention has 6 * 8 * 16 = 768 more.

    32 tokens, four blocks, at half of 989e12 a second.
    """
    operations = 32 * (4 * (6 * 576 + 768) + 6 * 256)
    assert duration_of(case(Topology()), model(**SMALL)).step == pytest.approx(operations / (0.5 * 989e12))
    again = 32 * 4 * 2 * (576 + 128)
    full = duration_of(case(Topology(), activation_checkpointing="full"), model(**SMALL))
    assert full.computing == pytest.approx((operations + again) / (0.5 * 989e12))
    for at in (Topology(tp=2), Topology(ring=2)):
        assert duration_of(case(at), model(**SMALL)).computing == pytest.approx(operations / 2 / (0.5 * 989e12))


def test_a_mixture_computes_with_the_experts_that_a_token_uses() -> None:
    """Two of four experts of 384; over two tp ranks at ep=1 each has all experts and all tokens."""
    of = model(**SMALL, experts=4)
    dense, used, head = 32 * 4 * (6 * 192 + 768), 32 * 4 * 6 * 2 * 384, 32 * 6 * 256
    one, two = (duration_of(case(at), of).computing * 0.5 * 989e12 for at in (Topology(), Topology(tp=2)))
    assert one == pytest.approx(dense + used + head)
    assert two == pytest.approx(dense / 2 + used + head / 2)


def test_messages_are_waited_for_or_pass_meanwhile() -> None:
    at, of = Topology(dp_shard=2, tp=2), model(**SMALL)
    moved, found = traffic(case(at), of, 0), duration_of(case(at), of)
    assert found.data == pytest.approx(sum(e.cost.seconds for e in moved if e.axis in DATA_AXES))
    assert found.waiting == pytest.approx(sum(e.cost.seconds for e in moved if e.axis == "tp"))
    assert found.step == max(found.data, found.computing + found.waiting)


def test_a_pipeline_idles_for_its_bubble() -> None:
    """1F1B over two stages with four micro-batches: a quarter of what the slower one takes, that with the head."""
    found = duration_of(case(Topology(pp=2)), model(**SMALL))
    assert found.idle == pytest.approx((found.computing + found.waiting) / 4)
    assert found.computing == pytest.approx(4 * 32 * (2 * (6 * 576 + 768) + 6 * 256) / (0.5 * 989e12))


def test_order_and_limit() -> None:
    """Of a batch of 64 over four ranks: every layout is there once, fitting ones by time, others by memory."""
    of, config = model(**{**SMALL, "batch": 64}), ParallelismConfig()
    layouts = [Topology(dp_shard=4), Topology(dp_replicate=4), Topology(tp=4), Topology(tp=2, dp_shard=2), Topology(pp=4)]
    needs = sorted(memory_of(of, at, config).device for at in layouts if at.tp < 4)
    machine = read_machine(MachineConfig(memory_gb=needs[1] / 1e9), 4)
    found = rank((type(case(at))(at, machine, config, False) for at in layouts), of)
    assert found.considered == len(layouts)
    assert len(found.fitting) == 2
    assert [each.memory.device for each in found.too_large] == needs[2:]
    assert [each.duration.step for each in found.fitting] == sorted(each.duration.step for each in found.fitting)
    assert found.refused == {"model.kv_heads=2 does not divide by parallelism.tp_size=4": 1}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RANK, "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["#", "layout", "step", "ms", "tokens/s", "GB", "computing", "waiting", "idle", "data", "axes"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert lines[5].endswith("do not go with the model")
    assert lines[6].startswith("  the least of what is too much: ")
    assert any("such as: model.heads=32 does not divide by tp_size=64" in line for line in lines)


def test_the_same_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *RANK)
    assert len(found["layouts"]) == 10
    assert found["considered"] == 462  # ways to write 64 as a product of six degrees: 11 over 5
    assert found["considered"] == found["fitting"] + found["too_large"] + sum(found["refused"].values())
    assert all(each["memory"] <= 80e9 for each in found["layouts"])
    assert found["smallest_too_large"]["memory"] > 80e9
    best = found["layouts"][0]
    again = told(capsys, *[word for word in RANK if word != "--rank"], *best["overrides"])["price"]
    assert again["step"]["seconds"] == best["seconds"]
    assert again["memory"]["device"] == best["memory"]
    assert best["tokens_per_s"] == pytest.approx(512 * 8192 / best["seconds"])
    assert found["notes"] == []


def test_degrees_that_are_set_stay(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *RANK, "parallelism.tp_size=8", "--top", "1000")
    assert found["considered"] == 35  # 8 as a product of five
    assert all("tp_size=8" in each["layout"] for each in found["layouts"])


def test_a_thousand_ranks_are_ranked_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert told(capsys, *RANK, "world.nodes=128", "model.batch=1024")["considered"] == 3003
    assert time.process_time() - began < 15


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank"], "--rank needs the shape of the model: model.hidden, layers, heads, ffn, vocab, sequence\n  try: "),
        (
            ["--rank", *LLAMA[:-2]],
            "--rank compares layouts at the same work, and model.batch is not set: the sequences of a step",
        ),
        (["--rank", "--format", "svg"], "--format svg is a picture of one layout\n  try: --format json with --rank\n"),
        (["--top", "3"], "--top 3 is the number of layouts that --rank lists\n  try: --rank --top 10\n"),
        (["--rank", "--top", "0", *LLAMA], "--top 0 is the number of layouts that --rank lists\n"),
        (["--rank", *LLAMA, "parallelism.tp_size=3"], "hydra.sweeper.axes has no layout for the world"),
        (["model.module=math:pi"], "model.module=math:pi: TypeError: 'float' object is not callable\n  try: model.module="),
        (["model.module=builtins:dict"], "model.module=builtins:dict returned dict, no torch.nn.Module\n"),
        (["model.module=a:b", "model.params=3"], "model.module=a:b and model.params=3: say the module or the numbers\n"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 1
    assert message in capsys.readouterr().err


def test_float32_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in RANK if word != "parallelism/fsdp=bf16"]
    assert told(capsys, *words)["notes"] == [
        "float32 is computed in, but timed at the speed of bfloat16; parallelism/fsdp=bf16 computes in that"
    ]


class Uneven(nn.Module):
    """Five features over two shards, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 5)) for _ in range(2))
        self.frozen = nn.Parameter(torch.empty(4, 2), requires_grad=False)


def test_what_ranks_hold_of_a_module() -> None:
    share = of_module(Uneven(), Topology(dp_shard=2), ParallelismConfig(fsdp=FSDPConfig(mixed_precision=MixedPrecision.bf16)))
    assert share.params == 2 * 20 + 8
    assert [(each.name, each.shape) for each in share.of(1)] == [
        ("frozen", (2, 2)),
        ("layers.0.0.weight", (2, 3)), ("layers.0.0.bias", (2,)), ("layers.1.0.weight", (2, 3)), ("layers.1.0.bias", (2,)),
    ]  # fmt: skip
    memory = share.memory(ParallelismConfig())
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * (4 + 2 * 12), 4 * 2 * 12, 8 * 2 * 12)
    assert share.rows(0)[1] == {"name": "layers.*.*.weight", "shape": [3, 3], "count": 2, "bytes": 4 * 2 * 9}


def test_a_module_is_built_without_storage() -> None:
    made = build("test_plan_rank:Uneven")
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}


def test_the_commands_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/plan.md").read_text()
    ranked, by_module = (_block(page.partition(f"## {title}")[2], "bash") for title in ("Ranking layouts", "A module in place"))
    assert cli.main(shlex.split(ranked)[1:]) == 0
    assert len(re.findall(r"^ *\d  ", capsys.readouterr().out, re.MULTILINE)) == 5
    (tmp_path / "mine.py").write_text(_block(page, "python\n# mine.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert cli.main(shlex.split(by_module)[1:]) == 0
    assert "; 234,624 parameters\n" in capsys.readouterr().out


def _block(page: str, kind: str) -> str:
    return page.partition(f"```{kind}\n")[2].partition("```")[0].replace("\\\n", " ")


def test_what_parallelize_refuses_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"parallelism.tp_size=2, but parallelism.tp_plan=null"):
        of_module(Uneven(), Topology(tp=2), ParallelismConfig())
