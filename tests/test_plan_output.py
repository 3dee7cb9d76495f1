"""``hydra-parallelism plan --output FILE``: the suffix says the format."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hydra_parallelism.plan import cli
from processes import ROOT

PLAN = ["plan", "parallelism.dp_shard=4", "parallelism.tp_size=2"]
KNOWN = "known are .svg, .html, .json, .txt"


def test_the_suffix_says_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.svg", "plan.html", "plan.json", "plan.txt"):
        assert cli.main([*PLAN, "--output", name]) == 0
        assert capsys.readouterr().out == f"wrote {name}\n"
    assert ET.parse("plan.svg").getroot().tag.endswith("svg")
    assert Path("plan.html").read_text().startswith("<!doctype html>")
    assert json.loads(Path("plan.json").read_text())["world_size"] == 8
    assert Path("plan.txt").read_text().startswith("dp_shard=4 * tp=2 = 8 ranks on 1 node of 8\n")
    assert cli.main([*PLAN, "--format", "json"]) == 0
    assert Path("plan.json").read_text() == capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.html", "plan.json", "plan.svg", "plan.txt"]


def test_the_commands_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs/plan.md").read_text().split("## Pictures\n")[1].split("\n## ")[0]
    commands = re.findall(r"^hydra-parallelism (.*)$", section, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert cli.main(command.split()) == 0
        assert capsys.readouterr().out == f"wrote {command.split()[-1]}\n"
    assert Path("plan.svg").read_text() == (ROOT / "docs/plan.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--output a.png", f"--output a.png: no format has the suffix .png; {KNOWN}\n  try: --output a.svg"),
        ("--output plan --format html", f"--output plan: no format has the suffix (none); {KNOWN}\n  try: --output plan.html"),
        ("--output a.svg --format html", "--format html, but --output a.svg is svg\n  try: --output a.html"),
        ("--output a.txt --format rich", "--format rich, but --output a.txt is text\n  try: --format text"),
        ("--output no/a.svg", "--output no/a.svg: no such folder\n  try: mkdir -p no"),
        ("--output there.svg", "--output there.svg: is a folder\n  try: --output there.svg/plan.svg"),
        ("--output a.json --colour tp", "--colour tp is for pictures\n  try: --format svg --colour tp"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.svg").mkdir()
    assert cli.main([*PLAN, *words.split()]) == 1
    assert capsys.readouterr() == ("", f"{message}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["there.svg"]
