"""The rules of checkpoints in one process: what is kept, what is refused, what a killed save leaves."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hydra_parallelism import ConfigurationError, ParallelismConfig, export, load, parallel_context, save
from processes import python, run


def make(seed: int = 0, hidden: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(12.0).view(3, 4) / 12).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def refusal(*arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*arguments)
    return str(caught.value)


def test_everything_comes_back(tmp_path: Path) -> None:
    model, other = make(), make(1)
    optimizer, resumed = adamw(model), adamw(other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    scheduler.step()
    extra = {"step": 1, "scheduler": scheduler.state_dict(), "best": torch.tensor(2.0), "names": ("a", None)}
    save(tmp_path / "deep" / "1", model, optimizer, extra=extra)
    assert load(tmp_path / "deep" / "1", other, resumed) == extra
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])  # buffers too
    assert resumed.param_groups[0]["lr"] == 0.05
    assert [step(model, optimizer) for _ in range(3)] == [step(other, resumed) for _ in range(3)]


def test_the_record_says_what_saved_it(tmp_path: Path) -> None:
    save(tmp_path / "plain", make())
    with parallel_context(ParallelismConfig()):
        save(tmp_path / "context", make())
    plain, context = (yaml.safe_load((tmp_path / name / "topology.yaml").read_text()) for name in ("plain", "context"))
    assert (plain["format"], plain["world_size"], plain["versions"]["torch"]) == (1, 1, torch.__version__)
    assert "degrees" not in plain
    assert context["degrees"]["dp_shard"] == context["dp_world_size"] == 1


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_optimizer_without_a_step_stays_one(tmp_path: Path, with_gradients: bool) -> None:
    model, optimizer = make(), adamw(make())
    optimizer = adamw(model)
    if with_gradients:
        model(torch.ones(3, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    save(tmp_path / "new", model, optimizer)
    assert not optimizer.state
    assert [parameter.grad for parameter in model.parameters()] == before  # the same objects, or none
    other = make(1)
    used = adamw(other)
    step(other, used)
    used.param_groups[0]["lr"] = 5.0
    load(tmp_path / "new", other, used)
    assert not used.state
    assert used.param_groups[0]["lr"] == 0.1
    model.zero_grad()
    assert [step(model, optimizer) for _ in range(3)] == [step(other, used) for _ in range(3)]


def test_parameters_that_never_had_a_gradient(tmp_path: Path) -> None:
    model, other = make(), make(1)
    for one in (model, other):
        one[0].weight.requires_grad_(False)
    optimizer, resumed = adamw(model), adamw(other)
    step(model, optimizer)
    save(tmp_path / "frozen", model, optimizer)
    for one in (model, other):
        one[0].weight.requires_grad_(True)
    load(tmp_path / "frozen", other, resumed)
    assert other[0].weight not in resumed.state
    assert [step(model, optimizer) for _ in range(3)] == [step(other, resumed) for _ in range(3)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(tmp_path: Path, momentum: float) -> None:
    model, other = make(), make(1)
    optimizer, resumed = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=momentum) for one in (model, other))
    step(model, optimizer)
    save(tmp_path / "sgd", model, optimizer)
    step(other, resumed)
    load(tmp_path / "sgd", other, resumed)
    assert [step(model, optimizer) for _ in range(3)] == [step(other, resumed) for _ in range(3)]


def test_param_groups_keep_their_settings_and_may_not_be_merged(tmp_path: Path) -> None:
    model, other = make(), make(1)

    def groups(one: nn.Sequential) -> torch.optim.Optimizer:
        first = {"params": one[0].parameters(), "lr": 1.0, "betas": (0.5, 0.6)}
        return torch.optim.AdamW([first, {"params": one[1].parameters()}, {"params": one[2].parameters()}], lr=0.25)

    optimizer = groups(model)
    step(model, optimizer)
    save(tmp_path / "groups", model, optimizer)
    resumed = groups(other)
    for group in resumed.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.1))
    load(tmp_path / "groups", other, resumed)
    assert [(group["lr"], group["betas"]) for group in resumed.param_groups] == [(1.0, (0.5, 0.6)), *[(0.25, (0.9, 0.999))] * 2]
    assert [step(model, optimizer) for _ in range(3)] == [step(other, resumed) for _ in range(3)]
    text = refusal(tmp_path / "groups", other, adamw(other))
    assert (
        "param group 0 of the optimizer holds parameters that were saved with different settings: lr=1.0 for 0.weight" in text
    )
    assert "lr=0.25 for 1.weight\n  try: the param groups that it was saved with" in text


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(torch.arange(3)))


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    optimizer, resumed = adamw(model), adamw(other)
    step(model, optimizer)
    save(tmp_path / "tied", model, optimizer)
    load(tmp_path / "tied", other, resumed)
    assert other.head.weight is other.embedding.weight
    assert [step(model, optimizer) for _ in range(3)] == [step(other, resumed) for _ in range(3)]
    export(tmp_path / "tied.pt", model)
    Tied().load_state_dict(torch.load(tmp_path / "tied.pt"))


def test_weights_alone(tmp_path: Path) -> None:
    model, other = make(), make(1)
    save(tmp_path / "full", model, adamw(model))
    load(tmp_path / "full", other)
    assert torch.equal(model[0].weight, other[0].weight)
    save(tmp_path / "weights", model)
    assert load(tmp_path / "weights", other) is None
    assert refusal(tmp_path / "weights", other, adamw(other)) == (
        "the checkpoint was saved without an optimizer\n  try: load(folder, model), and start with a new optimizer"
    )


def test_another_model_or_optimizer_changes_nothing(tmp_path: Path) -> None:
    model = make()
    optimizer = adamw(model)
    step(model, optimizer)
    save(tmp_path / "1", model, optimizer)
    wide, longer, shorter = make(hidden=9), make().append(nn.Linear(2, 2)), make()[:2]
    for other, texts in (
        (
            wide,
            ["  other shapes: model.0.bias is (8,) in the checkpoint and (9,) here, model.0.weight is (8, 4)", "and 2 more"],
        ),
        (longer, ["  the checkpoint lacks: model.3.bias, model.3.weight\n"]),
        (shorter, ["  only the checkpoint has: model.2.bias, model.2.weight\n"]),
    ):
        kept, fresh = {name: value.clone() for name, value in other.state_dict().items()}, adamw(other)
        text = refusal(tmp_path / "1", other, fresh)
        assert all(part in text for part in texts), text
        assert "optimizer." not in text
        assert not fresh.state
        assert all(torch.equal(value, kept[name]) for name, value in other.state_dict().items())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "only the checkpoint has: optimizer.state.0.bias.exp_avg, " in refusal(tmp_path / "1", model, sgd)


def test_a_checkpoint_is_not_replaced_by_accident(tmp_path: Path) -> None:
    save(tmp_path / "1", make(), extra=1)
    with pytest.raises(ConfigurationError, match=r"1 exists already\n  try: a folder with the number of the step, or save\("):
        save(tmp_path / "1", make())
    save(tmp_path / "1", make(), extra=2, overwrite=True)
    assert load(tmp_path / "1", make()) == 2
    (tmp_path / "precious").mkdir()
    with pytest.raises(ConfigurationError, match="precious exists and is not a checkpoint, so it is not replaced"):
        save(tmp_path / "precious", make(), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "precious"]


def test_what_is_no_plain_data_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    for extra in (Path("x"), {"f": lambda: 0}, socket.socket):
        with pytest.raises(ConfigurationError, match="extra could not be read back from the checkpoint") as caught:
            save(tmp_path / "1", make(), extra=extra)
        assert "try: extra={'step': step, 'scheduler': scheduler.state_dict()}" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "1", make())


def test_what_is_not_whole_is_not_read(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none", make()).startswith(f"there is no checkpoint at {tmp_path}/none\n  try: the folder")
    folder = tmp_path / "1"
    save(folder, make())
    data, record = folder / "__0_0.distcp", folder / "topology.yaml"
    content, said = data.read_bytes(), record.read_text()
    data.write_bytes(content[:-100])
    assert "is incomplete: 1 file(s) are missing or too short: __0_0.distcp\n" in refusal(folder, make())
    data.unlink()
    assert "try: copy the folder again, or an earlier checkpoint" in refusal(folder, make())
    data.write_bytes(content)
    record.write_text(said.replace("format: 1", "format: 2"))
    assert "topology.yaml has format 2, and this release reads 1\n  try: hydra-parallelism " in refusal(folder, make())
    record.unlink()
    assert "lacks topology.yaml, so it is not a whole checkpoint of hydra_parallelism.save()" in refusal(folder, make())
    record.write_text(said)
    (folder / ".metadata").unlink()
    assert "lacks .metadata, so" in refusal(folder, make())


@pytest.mark.processes
def test_a_save_that_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    save(tmp_path / "last", model, extra={"step": 1})
    for name in ("last", "other"):
        outcome = run(python("killed.py", str(tmp_path / name)), tmp_path)
        assert outcome.code == -signal.SIGXFSZ, outcome.text
    assert load(tmp_path / "last", model) == {"step": 1}
    text = refusal(tmp_path / "other", model)
    assert f"a save into it was killed and left {tmp_path}/.other.partial" in text
    for name in ("last", "other"):
        save(tmp_path / name, model, extra={"step": 3}, overwrite=True)
        assert load(tmp_path / name, model) == {"step": 3}
    assert sorted(os.listdir(tmp_path)) == ["last", "other"]


def test_export_writes_what_a_plain_model_loads(tmp_path: Path) -> None:
    model, other = make(), make(1)
    export(tmp_path / "deep" / "model.pt", model)
    export(tmp_path / "deep" / "model.pt", model)
    assert os.listdir(tmp_path / "deep") == ["model.pt"]
    other.load_state_dict(torch.load(tmp_path / "deep" / "model.pt"), strict=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(
        ConfigurationError, match=r"is a folder, and export writes one file\n  try: export\('.*/model\.pt', model"
    ):
        export(tmp_path, model)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is named like another\n  try: model\.pt"):
        export(tmp_path / "model.safetensors", model)
