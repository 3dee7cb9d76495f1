"""The console blocks of the documentation: what is typed, and what is shown below it."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT

DOCS = ROOT / "docs"
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "hydra-parallelism": [sys.executable, "-m", "hydra_parallelism.plan"],
}


@dataclass(frozen=True)
class Command:
    """One line after a ``$``, and the lines below it."""

    page: str
    line: str
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """As a shell would split it."""
        return shlex.split(self.line, comments=True)

    @property
    def is_refused(self) -> bool:
        """Whether the page shows a refusal, after which the exit status is 1."""
        return any(line.strip().startswith("try: ") for line in self.shown)

    def to_run(self) -> list[str]:
        """The words with the programs of this environment."""
        found: list[str] = []
        for word in self.words:
            found += PROGRAMS.get(word, [word])
        return found


def pages() -> list[str]:
    """Every page that somebody wrote, relative to ``docs/``."""
    found = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    return [page for page in found if not page.startswith(("reference/", "_"))]


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"^```(\S*)\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def console(page: str) -> list[Command]:
    """The commands of a page, in order: after a ``$`` in a ``console`` block, or the lines of a ``bash`` block."""
    found: list[Command] = []
    for language, block in blocks(page):
        text = re.sub(r" *\\\n *", " ", block)
        if language == "bash" and not text.startswith("#!"):
            text = re.sub(r"^(?=\w)", "$ ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
        elif language != "console":
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            found.append(Command(page, line, tuple(line for line in shown if line.strip())))
    return found


def missing(shown: tuple[str, ...], text: str) -> str:
    """The first line that is not in a text after those before it, or nothing.

    ``...`` stands for anything, and any number with a decimal point for any other: losses depend on the Python release, whose
    help the examples read.
    """
    lines = iter(text.splitlines())
    for line in shown:
        wanted = re.sub(r"\d+\\\.\d+", r"\\d+\\.\\d+", re.escape(line.rstrip()).replace(r"\.\.\.", ".*"))
        if not any(re.fullmatch(wanted, said.rstrip()) for said in lines):
            return line
    return ""


def copy_of_the_app(folder: Path) -> Path:
    """A folder with the examples and their config, in which a page's commands can be typed."""
    for name in ("conf", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder
