"""Runs scripts one after the other as if torchrun had started each: every rank is forked from this process.

Importing torch and Transformers is most of what a short job costs; here it is paid once. ``JOBS`` in the environment is a JSON
list of ``{"command": [SCRIPT, ARGUMENT, ...], "ranks": N}``; ``done.json`` gets what each rank wrote and its exit status.
"""

import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch.distributed.pipelining
from matplotlib import figure
from sklearn.datasets import load_digits
from transformers import AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM

import hydra_parallelism.checkpoint
import hydra_parallelism.parallelize

LOADED = (torch, AutoConfig, LlamaForCausalLM, Qwen3ForCausalLM, load_digits, figure, hydra_parallelism)
DEADLINE = 60.0


def one_rank(command: list[str], rank: int, ranks: int, port: int, folder: Path) -> None:
    """Become a rank. Does not return."""
    code = 1
    try:
        stream = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        place |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "warm"}
        os.environ.update({name: str(value) for name, value in place.items()})
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(command: list[str], ranks: int, folder: Path) -> dict[str, object]:
    """One job to its end."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            one_rank(command, rank, ranks, port, folder)
        children.append(child)
    codes, until = dict.fromkeys(children, -1), time.monotonic() + DEADLINE
    waiting = set(children)
    while waiting:
        for child in list(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                waiting.discard(child)
            elif time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    texts = [(folder / str(rank)).read_text() for rank in range(ranks)]
    return {"text": texts[0], "codes": list(codes.values()), "others": texts[1:]}


if __name__ == "__main__":
    jobs = json.loads(os.environ.pop("JOBS"))
    done = [run(job["command"], job["ranks"], Path(f"streams{number}")) for number, job in enumerate(jobs)]
    Path("done.json").write_text(json.dumps(done))
