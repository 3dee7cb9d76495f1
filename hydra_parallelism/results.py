"""``results.csv`` of a sweep: one row for each job, in ``<sweep dir>``.

The file is written anew after each job and put in place in one step, so that a sweep that is killed at any moment leaves a
whole file with every row it had. Columns, in order::

    job, status, pp_size, dp_replicate, ..., tp_size, ep_size, world_size,   how the job was laid out
    loss, tokens_per_s, ...                                                  the numbers that the tasks returned
    seconds, peak_memory_mib, peak_memory_mib_per_rank,                      what it cost
    folder, error, overrides, fingerprint                                    where it is and what it was

An empty cell means "not known": a job that could not be laid out has no degrees. Text is UTF-8; a number is written so that
reading it gives the same number again.
"""

import contextlib
import csv
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from .errors import ConfigurationError
from .outcome import BACK, DEGREES, FRONT, Row, Status, check_names

__all__ = ["ResultsFile", "write_whole"]

_MIB = 2**20
_T = TypeVar("_T", int, float)


class ResultsFile:
    """``results.csv`` of one sweep. Threads may share an object; one object at a time may write a folder.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / "results.csv"
        self._lock = threading.Lock()
        self._rows: dict[str, Row] | None = None
        self._lines: dict[str, str] = {}
        self._names: list[str] = []

    def read(self) -> list[Row]:
        """All rows, in the order they came; none when there is no file.

        Raises:
            ConfigurationError: The file is not one of ours, or a line of it is broken.
        """
        try:
            with open(self.path, encoding="utf-8-sig", newline="") as file, _any_length():
                return self._parse(file)
        except FileNotFoundError:
            return []
        except (csv.Error, UnicodeDecodeError) as error:
            raise self._refuse(str(error)) from None

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with the same fingerprint. The file on disk is whole at every moment.

        Raises:
            ConfigurationError: A number of the row is named as a column is, or the file that is there is not one of ours.
        """
        problems = check_names(row.numbers)
        if problems:
            raise ConfigurationError("\n  ".join(["the numbers of a job cannot be written:", *problems]))
        with self._lock:
            if self._rows is None:
                self._rows = {each.fingerprint: each for each in self.read()}
            rows = {**self._rows, row.fingerprint: row}
            names = list(dict.fromkeys(name for each in rows.values() for name in each.numbers))
            fresh = [row] if names == self._names else list(rows.values())  # a new column changes every line
            lines = self._lines | {each.fingerprint: _line(_cells(each, names)) for each in fresh}
            text = "".join([_line([*FRONT, *names, *BACK]), *(lines[fingerprint] for fingerprint in rows)])
            write_whole(self.path, text.encode("utf-8", "backslashreplace"))  # a path may hold bytes that are no UTF-8
            self._rows, self._lines, self._names = rows, lines, names

    def _parse(self, file: TextIO) -> list[Row]:
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
        names = self._names_in(header)
        rows = []
        for cells in lines:
            if len(cells) != len(header):
                raise self._refuse(f"line {lines.line_num} has {len(cells)} cells, not {len(header)}")
            try:
                rows.append(_parse_row(dict(zip(header, cells, strict=True)), names))
            except ValueError as error:
                raise self._refuse(f"line {lines.line_num}: {error}") from None
        return rows

    def _names_in(self, header: list[str]) -> list[str]:
        """The numbers that a header names, if it is ours."""
        names = header[len(FRONT) : len(header) - len(BACK)]
        if tuple(header) != (*FRONT, *names, *BACK) or check_names(names) or len(set(names)) < len(names):
            raise self._refuse(f"its columns are {', '.join(header) or 'none'}; must be {', '.join(FRONT)}, the numbers that "
                               f"the jobs returned, {', '.join(BACK)}")  # fmt: skip
        return names

    def _refuse(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"{self.path} is not the results of a sweep: {why}\n  try: mend it, or move it away")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it sees the old or the new one, also when this process is killed.

    Nothing waits for the disk, which takes longer than some jobs: after a power cut the last rows may be missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # one name: what a killed writer leaves, the next one overwrites
    with open(part, "wb") as file:
        file.write(data)
    os.replace(part, path)


@contextlib.contextmanager
def _any_length() -> Iterator[None]:
    """The csv module refuses cells of more than 128 kB, as an error may be that prints a tensor."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _line(cells: list[str]) -> str:
    return f"{','.join(map(_quote, cells))}\n"


def _quote(cell: str) -> str:
    """A cell as CSV. Not the csv module's writer, which leaves a lone carriage return bare on some versions of Python."""
    cell = cell.replace("\0", "\\0")  # Python 3.10 does not read these
    return f'"{cell.replace(chr(34), chr(34) * 2)}"' if any(mark in cell for mark in ',"\r\n') else cell


def _cells(row: Row, names: list[str]) -> list[str]:
    memory = [_mib(peak) for peak in row.peak_memory]
    return [
        str(row.job),
        row.status.value,
        *(_show(row.degrees.get(name)) for name in DEGREES),
        _show(row.world),
        *(_show(row.numbers.get(name), float) for name in names),
        _show(row.seconds, float),
        _mib(max(row.peak_memory)) if memory else "",
        " ".join(memory),
        row.folder,
        row.error,
        row.overrides,
        row.fingerprint,
    ]


def _show(value: float | None, kind: type = int) -> str:
    return "" if value is None else repr(kind(value))


def _mib(size: int) -> str:
    return repr(size / _MIB).removesuffix(".0")  # exact: the divisor is a power of two


def _parse_row(cells: Mapping[str, str], names: list[str]) -> Row:
    numbers = {name: _read(cells, name, float) for name in names}
    degrees = {name: _read(cells, name, int) for name in DEGREES}
    job = _read(cells, "job", int)
    if job is None:
        raise ValueError("job is empty")
    return Row(
        job=job,
        fingerprint=cells["fingerprint"],
        status=Status(cells["status"]),
        degrees={name: degree for name, degree in degrees.items() if degree is not None},
        world=_read(cells, "world_size", int),
        numbers={name: number for name, number in numbers.items() if number is not None},
        seconds=_read(cells, "seconds", float),
        peak_memory=tuple(round(float(peak) * _MIB) for peak in cells["peak_memory_mib_per_rank"].split()),
        folder=cells["folder"],
        error=cells["error"],
        overrides=cells["overrides"],
    )


def _read(cells: Mapping[str, str], name: str, kind: type[_T]) -> _T | None:
    try:
        return kind(cells[name]) if cells[name] else None
    except ValueError:
        raise ValueError(f"{name}={cells[name]} is no {'whole ' if kind is int else ''}number") from None
