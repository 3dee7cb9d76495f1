"""docs/troubleshooting.md: each message in it is what the library says today, word for word."""

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn

import hydra_parallelism
from hydra_parallelism import ParallelismError, interpolations, launch, parallel_context, ranking, resolve, run_mode
from hydra_parallelism.agreement import settle
from hydra_parallelism.launcher_config import TorchrunConfig
from hydra_parallelism.logs import console_ranks
from hydra_parallelism.options import read_config
from hydra_parallelism.outcome import Row, Status, numbers_of
from hydra_parallelism.parallelize import order
from hydra_parallelism.rendezvous import master_address
from hydra_parallelism.world import World, read
from processes import ROOT

sys.path.insert(0, str(importlib.import_module("processes").APPS))

import models
import tiny

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SAID = dict(re.findall(r"^### (.+?)\n+```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE))
"""Heading -> the message below it."""
SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def ask(interpolation: str, **config: Any) -> None:
    """What is done with the app's config before its task runs."""
    interpolations.check(OmegaConf.create({**config, "batch": interpolation}))


def judge(model: nn.Module, world: int, **config: Any) -> None:
    """What ``parallelize`` does first."""
    order.judge(model, read_config(config, "parallelism"), resolve(config, world))


def alone(**variables: str) -> World:
    """The place of one rank."""
    found = read({**TORCHRUN, **variables})
    assert found is not None
    return found


def disagree() -> None:
    """Two ranks, one of them in a thread, whose configs differ."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5))

    def other() -> None:
        mine = dist.TCPStore("127.0.0.1", store.port, 1, False, timedelta(seconds=5))
        vote(mine, "0", {"parallelism.tp_size": 1})

    thread = threading.Thread(target=other)
    thread.start()
    try:
        vote(store, "1", {"parallelism.tp_size": 2}, quiet=False)
    finally:
        thread.join()


def vote(store: dist.Store, rank: str, fingerprint: Mapping[str, Any], *, quiet: bool = True, seconds: float = 5) -> None:
    """Settle as a rank of two."""
    world = alone(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        settle(store, world, fingerprint, None, timeout=timedelta(seconds=seconds))
    except ParallelismError:
        if not quiet:
            raise


def nobody_else_comes() -> None:
    vote(dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5)), "0", {}, quiet=False, seconds=0.5)


def twice() -> None:
    with parallel_context({}):
        model = hydra_parallelism.parallelize(models.make("gpt"))
        hydra_parallelism.parallelize(model)


def inside_another() -> None:
    with parallel_context({}):
        hydra_parallelism.init({})


def saved_twice() -> None:
    os.makedirs("checkpoint")
    hydra_parallelism.save("checkpoint", models.make("gpt"))


def rows_of(**numbers: float) -> list[Row]:
    """A job's results with these numbers."""
    return [Row(job=0, fingerprint="", status=Status.ok, numbers=numbers)]


def tied() -> nn.Module:
    model = tiny.GPT()
    model.head.weight = model.token_embedding.weight
    return model


CASES: dict[str, Callable[[], object]] = {
    "parallelism does not fit the world": lambda: resolve(
        {"dp_replicate": 2, "tp_size": 3}, 8, source="WORLD_SIZE=8 (torchrun)"
    ),
    "... takes what is left, but the others multiply to": lambda: resolve(
        {"dp_shard": -1, "tp_size": 3}, 8, source="WORLD_SIZE=8 (torchrun)"
    ),
    "parallelism is not valid": lambda: resolve({"dp_shards": 2, "tp_size": 0, "pp_size": -1, "dp_shard": -1}, 8),
    "parallelism.cfg_parallel=2 is for inference only": lambda: resolve({"cfg_parallel": 2}, 2),
    "expert parallelism does not fit": lambda: resolve({"dp_shard": 4, "ep_size": 3}, 4),
    "parallelism.world_size=8, but": lambda: resolve({"dp_shard": -1, "world_size": 8}, 4, source="WORLD_SIZE=4 (torchrun)"),
    "no axis": lambda: resolve({"dp_shard": -1}, 4).group("dp_shards", 0),
    "ranks disagree": disagree,
    "... does not divide over ... data-parallel ranks": lambda: ask(
        "${parallelism.per_dp_rank:30}", parallelism={"dp_replicate": 2, "dp_shard": 2}
    ),
    "... no such number; known are": lambda: ask("${parallelism:dp_size}", parallelism={}),
    "the config has no node 'parallelism'": lambda: ask("${parallelism:dp_shard}"),
    "a degree of parallelism cannot be made of degrees": lambda: ask(
        "${parallelism:tp}", parallelism={"tp_size": "${parallelism:dp_shard}"}
    ),
    "the launcher's options are not valid": lambda: launch.check(TorchrunConfig(nnodes=2, nproc_per_node="many"), 2),
    "WORLD_SIZE=8 is set but RANK is not": lambda: read({"WORLD_SIZE": "8"}),
    "the launcher's variables contradict each other": lambda: read({**TORCHRUN, "RANK": "9"}),
    "nothing says where rank 0 is": lambda: master_address(read(SLURM), SLURM),
    "... waited ... for the other ranks": nobody_else_comes,
    "a sweep starts the processes of its jobs itself": run_mode.refuse_sweep,
    "this program cannot be started again for each rank": run_mode._command,
    "... but nobody launched this one": lambda: hydra_parallelism.init({"dp_shard": 4}),
    "no parallel context": hydra_parallelism.current,
    "a parallel context is alive already": inside_another,
    "... sees no CUDA device": lambda: hydra_parallelism.init({"runtime": {"device_type": "cuda"}}),
    "... must be 'all' or ranks between": lambda: console_ranks(9, 4, "parallelism"),
    "... ranks would compute the whole model each": lambda: judge(models.make("gpt"), 2, tp_size=2),
    "parallelism.tp_size=4 does not divide": lambda: judge(models.make("odd"), 4, tp_size=4, tp_plan="auto"),
    "... no module is called": lambda: judge(models.make("gpt"), 2, tp_size=2, tp_plan={"layers.*.attention.q_pro": "colwise"}),
    "... but the model has ... repeated blocks": lambda: judge(tiny.GPT(), 8, pp_size=8),
    "... are one parameter": lambda: judge(tied(), 2, pp_size=2),
    "... would shard ... as one unit": lambda: judge(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2, dp_shard=2),
    "... ranks would hold all experts each": lambda: judge(tiny.Mixture(), 2, dp_shard=2, ep_size=2),
    "... has been parallelized already": twice,
    "... exists already": saved_twice,
    "there is no checkpoint at": lambda: hydra_parallelism.load("checkpoint", models.make("gpt")),
    "the jobs returned ...: which one ranks them?": lambda: ranking.objective_of(rows_of(loss=1.0, tokens_per_s=2.0), None),
    "the task returns ..., which is no number": lambda: numbers_of("fast"),
}
"""Heading -> a real call that is refused with the message below it."""


def actual(heading: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    hydra_parallelism.shutdown()  # and with it what an earlier refusal has left for current() to say
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if "a sweep starts" in heading:
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", "train.lr=1,2"])
    if "cannot be started again" in heading:
        monkeypatch.setattr(sys, "orig_argv", ["python"])
    with pytest.raises(ParallelismError) as caught:
        CASES[heading]()
    return str(caught.value).replace(str(folder), "FOLDER").rstrip()


def pattern(shown: str) -> str:
    """A regular expression for what a page shows: ``...`` stands for anything."""
    return re.escape(shown).replace(r"\.\.\.", ".*")


@pytest.mark.parametrize("heading", CASES)
def test_the_message_is_what_the_page_says(heading: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "CUDA" in heading and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    said = actual(heading, monkeypatch, tmp_path)
    assert re.fullmatch(pattern(SAID[heading]), said, re.DOTALL), said
    assert re.search(pattern(heading), said, re.DOTALL), "the heading is a part of its message"


def test_every_heading_is_tried_and_nothing_else() -> None:
    assert list(SAID) == list(CASES)
    assert re.findall(r"^### (.+)", PAGE, re.MULTILINE) == list(CASES), "each has its message below it"
