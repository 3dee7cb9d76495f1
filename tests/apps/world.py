"""Do all that one start of processes is for: ``world.py SIZE PIECES``, the latter as JSON, ``{piece of work: its argument}``.

The processes are forked here once torch is imported, which would take each of them seconds, and find each other as torchrun's
do: by the environment. Each rank writes what came of its work to ``worldSIZE-rankRANK.json``.
"""

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PIECES = {
    "parity": "parity",
    "observe": "observe",
    "resume": "resume",
    "norms": "norms",
    "pipelines": "pipeline_parity",
    "refusals": "pipeline_refusals",
    "context": "context_models",
    "llamas": "llamas",
    "branches": "branches",
    "fuzz": "fuzz",
    "attention": "attend",
    "others": "others",
    "native": "native",
}
"""Piece of work -> the app whose ``report`` does it."""


LATE = ("torch._dynamo", "torch.distributed.pipelining", "torch.distributed.checkpoint.state_dict")
"""What torch imports at the first optimizer, pipeline and checkpoint: seconds in each rank, and garbage to look through."""


def main(size: int, pieces: dict[str, Any]) -> None:
    """Fork the ranks and wait for them; the first that fails ends all."""
    functions = {name: importlib.import_module(PIECES[name]).report for name in pieces}
    for late in LATE:
        importlib.import_module(late)
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # a context collects garbage when it ends, and need not look through all of torch
    if size == 1:
        work(functions, pieces, 0, 1)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [fork(functions, pieces, rank, size, port) for rank in range(size)]
    for _ in ranks:
        _, status = os.wait()
        if status:
            for pid in ranks:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            sys.exit(1)


def fork(functions: dict[str, Callable[..., Any]], pieces: dict[str, Any], rank: int, size: int, port: int) -> int:
    """Start one rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    status = 1
    try:
        work(functions, pieces, rank, size)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def work(functions: dict[str, Callable[..., Any]], pieces: dict[str, Any], rank: int, size: int) -> None:
    """Do the pieces one after the other."""
    report = {}
    for name, argument in pieces.items():
        began = time.process_time()
        report[name] = functions[name](*argument)
        print(f"{name} of {size}: {time.process_time() - began:.1f} s of CPU time", flush=True)
    Path(f"world{size}-rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
