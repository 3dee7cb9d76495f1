"""Rank 3 never comes."""

import os
import time

from hydra_parallelism import LaunchError, parallel_context

if os.environ["RANK"] == "3":
    time.sleep(60)
try:
    with parallel_context({"dp_shard": -1, "runtime": {"start_timeout_s": 3}}):
        pass
except LaunchError as error:
    os.write(1, f"BODY {error}\n".encode())
    raise SystemExit(1) from None
