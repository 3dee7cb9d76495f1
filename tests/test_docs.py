"""The documentation: every command in it runs, every page is in the navigation, the reference lists what the code has."""

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import hydra_parallelism
from console import DOCS, Command, blocks, console, copy_of_the_app, missing, pages
from hydra_parallelism import config, launcher_config, store, sweeper_config
from hydra_parallelism.plan.cli import main as hydra_parallelism_command
from hydra_parallelism.resolvers import _RESOLVERS
from hydra_parallelism.topology import AXES
from processes import APPS, ROOT, clean_environment, run, start

TOGETHER = ("howto/axes.md", "howto/huggingface.md")
"""Pages of many short jobs: their ranks are forked from one process instead of being started by the command itself."""
ELSEWHERE = {
    "howto/slurm.md": "test_slurm.py",
    "howto/torchrun.md": "test_docs.py",
    "hydra-parallelism plan parallelism=fsdp_tp parallelism.tp_plan=auto model.module=mine:build": "test_plan_rank.py",
    "hydra-parallelism doctor": "test_doctor.py",
}
"""Page -> the file with the tests that take its commands from it; or one command -> the file with a test of the same words."""
SHELLS = {"sh", "shell", "zsh", ""}


def by_itself(command: Command) -> bool:
    return command.page not in TOGETHER and not {command.page, command.line} & set(ELSEWHERE)


EVERY = [command for page in pages() for command in console(page)]
PLANS = [command for command in EVERY if by_itself(command) and command.words[:2] == ["hydra-parallelism", "plan"]]
ALONE = list({command.line: command for command in EVERY if by_itself(command) and command not in PLANS}.values())
MANY = [command for command in EVERY if command.page in TOGETHER]


def check(command: Command, text: str, code: int) -> None:
    """The exit status and the lines that the page shows."""
    assert code == (1 if command.is_refused else 0), text
    assert not missing(command.shown, text), f"{missing(command.shown, text)!r} is not in what it prints:\n{text}"


# Commands


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert len(EVERY) > 15
    for page in pages():
        for language, text in blocks(page):
            assert language not in SHELLS, f"{page}: commands go into a console block, after a $:\n{text}"
            if text.startswith("#!"):  # a script, which the page's tests run
                assert f'blocks("{page}")' in (ROOT / "tests" / ELSEWHERE[page]).read_text()
    for what, file in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        if what.endswith(".md"):
            assert f'console("{what}")' in text
        else:
            (page,) = {command.page for command in EVERY if command.line == what}
            assert f"docs/{page}" in text or not [word for word in what.split()[1:] if word not in text]


@pytest.mark.parametrize("command", PLANS, ids=lambda command: command.line)
def test_a_plan(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy_of_the_app(tmp_path))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = hydra_parallelism_command(command.words[1:])
    check(command, said.getvalue(), code)


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ALONE, ids=lambda command: command.line)
def test_a_command(command: Command, tmp_path: Path) -> None:
    outcome = run(command.to_run(), copy_of_the_app(tmp_path), deadline=280, env=environment())
    check(command, outcome.text, outcome.code)


def environment() -> dict[str, str]:
    return {**clean_environment(CUDA_VISIBLE_DEVICES=""), "COLUMNS": "200"}


@cache
def outcomes(folder: Path) -> dict[str, dict]:
    """Command -> what its ranks did."""
    jobs = [{"command": command.words[1:], "ranks": ranks_of(command)} for command in MANY]
    running = start(
        [sys.executable, APPS / "warm.py"], copy_of_the_app(folder), env={**environment(), "JOBS": json.dumps(jobs)}
    )
    try:
        text, _ = running.communicate(timeout=380)
    finally:
        running.kill()
    assert running.returncode == 0, text
    done = json.loads((folder / "done.json").read_text())
    return dict(zip([command.line for command in MANY], done, strict=True))


def ranks_of(command: Command) -> int:
    """How many processes the command would start."""
    script = Path(command.words[1])
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base=None):
        name = "config" if script.stem == "train" else script.stem
        name = name if (ROOT / f"conf/{name}.yaml").exists() else "config"
        composed = compose(name, command.words[2:])
    return int(OmegaConf.create({**composed, "answer": "${parallelism:world_size}"}).answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("command", MANY, ids=lambda command: command.line)
def test_a_short_job(command: Command, folder: Path) -> None:
    outcome = outcomes(folder)[command.line]
    assert set(outcome["codes"]) == {0}, outcome
    check(command, outcome["text"], 0)


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("pages")
def test_the_loss_is_the_same_under_every_layout(folder: Path) -> None:
    """As the page says."""
    found = outcomes(folder)
    texts = [found[command.line]["text"] for command in console("howto/axes.md") if "examples/train.py" in command.line]
    losses = [float(re.findall(r"step 2/2 loss (\d+\.\d+)", text)[0]) for text in texts]
    assert len(losses) == 7
    assert losses == pytest.approx([losses[0]] * 7, abs=2e-4)


@pytest.mark.processes
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    """Two agents of this machine stand for the nodes of docs/howto/torchrun.md."""
    (command,) = console("howto/torchrun.md")
    port, folder = 28000 + os.getpid() % 900, copy_of_the_app(tmp_path)
    agents = []
    for host in (1, 0):
        words = [word.replace("node0:29500", f"127.0.0.1:{port}") for word in command.to_run()]
        here = words.index("--rdzv-id")
        words[here:here] = [f"--rdzv-conf=is_host={host}", "--local-addr=127.0.0.1"]  # both would be the first on this machine
        agents.append(start(words, folder, env=environment()))
    try:
        texts = [agent.communicate(timeout=170)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], texts
    assert [missing(command.shown, text) for text in texts].count("") == 1, texts


# Pages


def test_every_page_is_in_the_navigation() -> None:
    index = (DOCS / "index.md").read_text()
    listed = [
        name for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for name in block.split("\n\n")[1].split()
    ]
    written = {page.removesuffix(".md") for page in pages()} - {"index"}
    assert sorted(listed) == sorted(written | {f"reference/{name}" for name in generator().pages()})


def test_links_between_pages_lead_somewhere() -> None:
    generated = {f"reference/{name}.md" for name in generator().pages()}
    for page in pages():
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", (DOCS / page).read_text()):
            at = os.path.normpath(Path(page).parent / target)
            assert at in generated or (DOCS / at).exists(), f"{page}: {target}"


# What is generated


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_generate", DOCS / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(node: object, path: str) -> set[str]:
    """Dotted paths of everything in a structured config."""
    plain = OmegaConf.to_container(OmegaConf.structured(node))
    assert isinstance(plain, dict)
    found, pending = set(), [(f"{path}.{name}", value) for name, value in plain.items() if name != "_target_"]
    for where, value in pending:
        if isinstance(value, dict) and value:
            pending += [(f"{where}.{name}", inner) for name, inner in value.items()]
        else:
            found.add(where)
    return found


@pytest.mark.parametrize(
    ("root", "schema"),
    [
        ("parallelism", config.ParallelismConfig),
        ("hydra.launcher", launcher_config.TorchrunConfig),
        ("hydra.sweeper", sweeper_config.LayoutsConfig),
    ],
)
def test_the_reference_has_every_key(root: str, schema: type) -> None:
    listed = generator().keys(root)
    assert {path for path, *_ in listed} == leaves(schema, root)
    assert [path for path, _, _, said in listed if not said] == [], "each says what it means"
    page = generator().pages()["config"]
    assert all(f"\n`{path}`\n" in page for path, *_ in listed)


def test_the_defaults_in_the_reference_are_those_of_the_config() -> None:
    node = OmegaConf.structured(config.ParallelismConfig)
    for path, _, default, _ in generator().keys("parallelism"):
        value = OmegaConf.select(node, path.removeprefix("parallelism."))
        plain = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
        assert default == getattr(value, "name", plain)


def test_the_reference_has_every_preset_resolver_and_name() -> None:
    made = generator().pages()
    assert set(re.findall(r"^\| `(\w+)` \|", made["presets"], re.MULTILINE)) == set(store.PRESETS)
    options = {f"parallelism/{group}={name}" for group, of in store.SUB_GROUPS.items() for name in of}
    assert set(re.findall(r"^\| `(parallelism/\S+)` \|", made["presets"], re.MULTILINE)) == options
    assert all(f"`{name}`" in made["resolvers"] for name in (*_RESOLVERS, *AXES, "rank", "nnodes", "dp_rank"))
    listed = re.findall(r"^\.\. auto\w+:: hydra_parallelism\.(\w+)$", made["api"], re.MULTILINE)
    assert sorted(listed) == hydra_parallelism.__all__


def test_the_list_of_messages_has_what_people_meet() -> None:
    made = generator().pages()["messages"]
    for first in (
        "expert parallelism does not fit:",
        "no parallel context: choose a preset",
        "… has been parallelized already",
    ):
        assert first in made


def test_the_drawing_is_what_the_command_draws() -> None:
    """After a change of the drawing: ``python docs/_generate.py``."""
    assert (DOCS / "rank_layout.svg").read_text() == generator().rank_layout()
