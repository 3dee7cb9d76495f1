"""How soon ``hydra-parallelism plan`` answers, next to what no such command can do without.

Runs the command, ``import hydra`` and an empty program, interleaved; medians of wall time, and of the child's CPU time (user +
system), which other work on the machine disturbs less. Usage: ``python benchmarks/plan.py [ROUNDS]``.
"""

import os
import platform
import resource
import statistics
import subprocess
import sys
import time

GOAL_S = 0.5
PLAN = ["-m", "hydra_parallelism.plan", "plan"]
COMMANDS = {
    "plan parallelism=hsdp world.nodes=16 world.per_node=8": [*PLAN, "parallelism=hsdp", "world.nodes=16", "world.per_node=8"],
    "the same for 65,536 ranks": [*PLAN, "parallelism=hsdp", "world.nodes=8192", "world.per_node=8"],
    "the same composed by Hydra": [*PLAN, "+parallelism.context_parallel={}", "parallelism=hsdp", "world.nodes=16"],
    "import hydra": ["-c", "import hydra"],
    "pass": ["-c", "pass"],
}


def measure(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a child process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            seconds = measure(command)
            if number:  # the first round writes bytecode
                times[name].append(seconds)
    print(f"{rounds} interleaved rounds, {os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}")
    for name, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{name:>55}: {wall:.3f} s, {cpu:.3f} s of CPU")
    first = statistics.median(wall for wall, _ in times[next(iter(COMMANDS))])
    print(f"{'goal':>55}: {GOAL_S} s, {'met' if first < GOAL_S else 'missed'}")


if __name__ == "__main__":
    main()
