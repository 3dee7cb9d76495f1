"""Where a plan is written: a file whose suffix is its format, or the console."""

import sys
from pathlib import Path

from ..errors import ConfigurationError

__all__ = ["PICTURES", "deliver", "format_of"]

PICTURES = ("svg", "html")
_FORMATS = {".svg": "svg", ".html": "html", ".json": "json", ".txt": "text"}


def format_of(output: str, chosen: str | None) -> str:
    """The format of a file, before anything is worked out.

    Args:
        output: Its path.
        chosen: What ``--format`` says, if anything.

    Raises:
        ConfigurationError: No format has that suffix, ``--format`` says another one, or the file cannot be there.
    """
    path = Path(output)
    kind = _FORMATS.get(path.suffix)
    if kind is None:
        suffix = next((known for known, name in _FORMATS.items() if name == chosen), ".svg")
        raise ConfigurationError(
            f"--output {output}: no format has the suffix {path.suffix or '(none)'}; known are {', '.join(_FORMATS)}\n"
            f"  try: --output {path.with_suffix(suffix) if path.name else 'plan' + suffix}"
        )
    if chosen not in (None, kind):
        fits = next((known for known, name in _FORMATS.items() if name == chosen), None)
        instead = f"--output {path.with_suffix(fits)}" if fits else f"--format {kind}"
        raise ConfigurationError(f"--format {chosen}, but --output {output} is {kind}\n  try: {instead}")
    if path.is_dir():
        raise ConfigurationError(f"--output {output}: is a folder\n  try: --output {path / f'plan{path.suffix}'}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--output {output}: no such folder\n  try: mkdir -p {path.parent}")
    return kind


def deliver(text: str, output: str | None) -> None:
    """Write to the file, or to the console.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    if output is None:
        sys.stdout.write(text)
        return
    from ..results import write_whole  # csv and more, which the console has no use for

    try:
        write_whole(Path(output), text.encode())
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}") from None
    sys.stdout.write(f"wrote {output}\n")
