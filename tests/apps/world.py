"""Do all that one start of processes is for: ``{piece of work: its argument}`` as JSON. Each rank writes what came of it."""

import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

import norms
import observe
import parity
import pipeline_parity
import pipeline_refusals
import resume
import torch

PIECES = {
    "parity": parity.report,
    "observe": observe.report,
    "resume": resume.report,
    "norms": norms.report,
    "pipelines": pipeline_parity.report,
    "refusals": lambda _: pipeline_refusals.report(),
}


def main() -> None:
    """Do the pieces one after the other."""
    report = {}
    for name, argument in json.loads(sys.argv[1]).items():
        began = time.process_time()
        report[name] = PIECES[name](argument)
        print(f"{name}: {time.process_time() - began:.1f} s of CPU time", flush=True)
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    # Not to stdout: a line of this length would not stay in one piece on a shared pipe.
    Path(f"world{size}-rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gc.freeze()  # a context collects garbage when it ends, and need not look through all of torch
    main()
