"""How far a sweep is: plain lines, and one line in place."""

import io
import os
import pty
import threading

import pytest

from hydra_parallelism.outcome import Status
from hydra_parallelism.progress import Progress, duration


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What the last line shows, without the blanks that wipe older text."""
        cells: list[str] = []
        at = 0
        for mark in self.getvalue():
            if mark == "\r":
                at = 0
                continue
            cells[at : at + 1] = [mark]
            at += 1
        return "".join(cells).rstrip()


def test_plain_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(6, stream, clock)
    progress.skip(0, "parallelism.tp_size=1")
    progress.start(1, "parallelism.tp_size=2")
    clock.now += 12.3
    progress.finish(1, Status.ok)
    progress.start(2, "parallelism.tp_size=4\nand more")
    clock.now += 27.7
    progress.finish(2, Status.out_of_memory)
    progress.finish(3, Status.failed)
    progress.refresh()
    progress.clear()
    progress.start(4, "")
    clock.now += 2
    progress.finish(4, Status.ok)
    progress.start(5, "x=1")
    clock.now += 2
    progress.finish(5, Status.ok)
    assert stream.getvalue() == (
        "[1/6] parallelism.tp_size=1: has a result, skipped\n"
        "[2/6] parallelism.tp_size=2: started\n"
        "[2/6] parallelism.tp_size=2: ok in 12.3 s (4 left, about 49 s more)\n"
        "[3/6] parallelism.tp_size=4: started\n"
        "[3/6] parallelism.tp_size=4: out of memory in 27.7 s (1 failed, 3 left, about 60 s more)\n"
        "[4/6] job 3: failed (2 failed, 2 left, about 40 s more)\n"
        "[5/6] job 4: started\n"
        "[5/6] job 4: ok in 2 s (2 failed, 1 left, about 14 s more)\n"
        "[6/6] x=1: started\n"
        "[6/6] x=1: ok in 2 s (2 failed)\n"
    )


def test_jobs_at_a_time_share_the_time_that_is_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(5, stream, clock)
    progress.start(0, "a")
    progress.start(1, "b")
    clock.now += 10
    progress.finish(1, Status.ok)
    assert stream.getvalue().endswith("[2/5] b: ok in 10 s (4 left, about 15 s more)\n"), "3 x 10 s and none of a, by two"


def test_one_line_in_place() -> None:
    stream, clock = Terminal(), Clock()
    progress = Progress(4, stream, clock, width=100)
    progress.start(0, "parallelism.tp_size=1")
    assert stream.screen() == "job 1 of 4, 1 running, 0 s: parallelism.tp_size=1"
    progress.start(1, "parallelism.tp_size=2")
    clock.now += 30
    progress.finish(0, Status.killed)
    assert stream.screen() == "job 2 of 4, 1 running, 1 failed, 30 s, about 30 s more: parallelism.tp_size=2"
    clock.now += 12.34
    progress.refresh()
    assert stream.screen() == "job 2 of 4, 1 running, 1 failed, 42.3 s, about 30 s more: parallelism.tp_size=2"
    progress.skip(2, "x")
    progress.finish(1, Status.ok)
    assert stream.screen() == "job 3 of 4, 1 failed, 1 skipped, 42.3 s, about 36 s more"
    progress.clear()
    assert stream.screen() == ""
    assert stream.getvalue().endswith("\r")
    assert "\n" not in stream.getvalue()
    before = stream.getvalue()
    progress.clear()
    assert stream.getvalue() == before, "nothing to take away"


@pytest.mark.parametrize(("width", "screen"), [(20, "job 1 of 1, 1 runni"), (1, ""), (0, "")])
def test_a_line_never_wraps(width: int, screen: str) -> None:
    stream = Terminal()
    Progress(1, stream, Clock(), width=width).start(0, "a label that is long")
    assert stream.screen() == screen


def test_a_terminal_is_asked_for_its_width() -> None:
    parent, child = pty.openpty()
    with open(child, "w", encoding="ascii") as stream, open(parent, "rb", buffering=0) as screen:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 53, 0, 0))
        progress = Progress(1, stream, Clock())
        progress.start(0, "\N{GREEK SMALL LETTER LAMDA}" * 90)
        text = os.read(screen.fileno(), 1000)
    assert text == b"\rjob 1 of 1, 1 running, 0 s: " + b"?" * 24
    assert len(text) == 1 + 52


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class Broken(Terminal):
    """Nobody reads it any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, closed(), Broken()])
def test_a_stream_may_be_missing(stream: io.StringIO | None) -> None:
    progress = Progress(2, stream)
    progress.start(0, "a")
    progress.finish(0, Status.ok)
    progress.skip(1, "b")
    progress.refresh()
    progress.clear()


def test_a_stream_may_close_on_the_way() -> None:
    stream = Terminal()
    progress = Progress(1, stream)
    progress.start(0, "a")
    stream.close()
    progress.finish(0, Status.ok)
    progress.clear()


def test_threads_share_an_object() -> None:
    stream = io.StringIO()
    progress = Progress(40, stream, Clock())

    def work(first: int) -> None:
        for job in range(first, first + 10):
            progress.start(job, f"x={job}")
            progress.finish(job, Status.ok)

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 80
    assert lines[-1].endswith(": ok in 0 s")
    assert sorted({int(line[1:].split("/")[0]) for line in lines}) == list(range(1, 41))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.04, "0.0 s"), (12.34, "12.3 s"), (90.4, "90 s"), (125, "2 min"), (3600, "1 h"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
