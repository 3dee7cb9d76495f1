"""What the plugin costs a Hydra app that does not use it.

Runs ``--cfg job`` of one small app in two environments, with and without the plugin, interleaved; compares CPU time (user +
system) of the child, and the time Hydra's plugin scanner reports. Usage: ``python benchmarks/startup.py [ROUNDS]``.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
APP = """
import hydra
kw = {"version_base": None} if hydra.__version__.startswith("1.3") else {}
@hydra.main(config_path=None, **kw)
def main(config): pass
main()
"""
SCAN = """
import json
from hydra.core.plugins import Plugins
import sys
stats = Plugins.instance().get_stats()
print(json.dumps([1e3 * stats.total_time, "torch" in sys.modules, len(sys.modules)]))
"""


def make_environment(folder: Path, *, plugin: bool) -> str:
    """A virtual environment that sees this one's packages, with or without the project."""
    venv.create(folder, symlinks=True)
    packages = folder / "others"
    packages.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "hydra_parallelism" not in entry.name and entry.suffix != ".pth" and entry.name != "hydra_plugins":
            (packages / entry.name).symlink_to(entry)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(f"{packages}\n")
    if plugin:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps",
             "--no-build-isolation", str(ROOT)],
            check=True,
        )  # fmt: skip
    return str(folder / "bin/python")


def cpu_seconds(command: list[str], cwd: Path) -> float:
    """User + system time of a child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print medians and ratios."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pythons = {kind: make_environment(folder / kind, plugin=kind == "with") for kind in ("without", "with")}
        (folder / "app.py").write_text(APP)
        cpu: dict[str, list[float]] = {kind: [] for kind in pythons}
        scans: dict[str, list[float]] = {kind: [] for kind in pythons}
        facts: dict[str, list[object]] = {}
        for number in range(rounds + 1):
            for kind, python in pythons.items():
                seconds = cpu_seconds([python, "app.py", "--cfg", "job"], folder)
                scan, *facts[kind] = json.loads(subprocess.check_output([python, "-c", SCAN], cwd=folder))
                if number:  # the first round writes bytecode
                    cpu[kind].append(seconds)
                    scans[kind].append(scan)
    print(f"{rounds} interleaved rounds, {os.cpu_count()} cores, Python {platform.python_version()}")
    for kind in pythons:
        torch_loaded, modules = facts[kind]
        print(f"{kind:>8}: --cfg job {statistics.median(cpu[kind]):.3f} s CPU, scan {min(scans[kind]):.1f} ms, "
              f"{modules} modules, torch loaded: {torch_loaded}")  # fmt: skip
    ratio = statistics.median(cpu["with"]) / statistics.median(cpu["without"])
    print(f"   ratio: {ratio:.3f} (goal 1.10), scan + {min(scans['with']) - min(scans['without']):.1f} ms (goal 5 ms)")


if __name__ == "__main__":
    main()
