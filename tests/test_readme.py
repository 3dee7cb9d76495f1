"""The README's app and commands give the output that the README shows."""

import re
import sys
from pathlib import Path

import hydra
import pytest

from hydra_parallelism.store import PRESETS
from processes import ROOT, run

pytestmark = pytest.mark.processes

README = (ROOT / "README.md").read_text()


def block(language: str, holding: str) -> str:
    found = [text for kind, text in re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL) if kind == language]
    return next(text for text in found if holding in text)


def comparable(text: str) -> list[str]:
    """Lines without what differs from run to run: times, and where Python is."""
    text = re.sub(r"\[\d{4}-\d\d-\d\d [\d:,]+\]", "[NOW]", text)
    text = re.sub(r"in \d+\.\d+ s", "in S s", text)
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    script = block("python", "# train.py")
    if not hydra.__version__.startswith("1.3"):  # as the README says
        whitelist = 'execution_whitelist=["hydra_parallelism.callback.ParallelismCallback"]'
        assert whitelist in README
        script = script.replace("version_base=None", whitelist)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text(block("yaml", "# conf/config.yaml"))
    return tmp_path


def test_the_console_block(app: Path) -> None:
    sections = re.split(r"^\$ python ", block("console", "$ python train.py"), flags=re.MULTILINE)[1:]
    assert len(sections) == 3
    for section in sections[:2]:
        command, _, shown = section.partition("\n")
        outcome = run([sys.executable, *command.split()], app)
        assert outcome.code == (1 if "does not fit" in shown else 0), outcome.text
        assert comparable(outcome.text) == comparable(shown)
    sweep = sections[2].split("#")[0]
    outcome = run([sys.executable, *sweep.split()], app)
    assert outcome.code == 0, outcome.text
    assert re.findall(r"(\d) process\(es\)\n", outcome.text) == ["1", "2", "4"]


def test_it_stays_short_and_names_what_exists() -> None:
    assert len(README.splitlines()) < 150
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
    listed = set(re.findall(r"\| `(\w+)` \|", README))
    assert listed == set(PRESETS)
