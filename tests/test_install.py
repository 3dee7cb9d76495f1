"""Both kinds of install are found by Hydra: a wheel and an editable one, each in an environment of its own."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from processes import ROOT, clean_environment, run

pytestmark = pytest.mark.processes

APP = """
import hydra
kw = {"version_base": None} if hydra.__version__.startswith("1.3") else {}
@hydra.main(config_path=None, **kw)
def main(config): print(config)
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def pip(interpreter: str, *arguments: str) -> None:
    # Through this environment's pip, so that the new one needs none of its own.
    command = [sys.executable, "-m", "pip", "--python", interpreter, "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=120, env=clean_environment())


def environment(folder: Path) -> str:
    """A virtual environment that sees the packages of this one, except the project itself."""
    venv.create(folder, symlinks=True)
    packages = folder / "others"
    packages.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "hydra_parallelism" not in entry.name and entry.suffix != ".pth" and entry.name != "hydra_plugins":
            (packages / entry.name).symlink_to(entry)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(f"{packages}\n")
    return str(folder / "bin/python")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_hydra_finds_the_plugin(kind: str, wheel: Path, tmp_path: Path) -> None:
    interpreter = environment(tmp_path / "env")
    if kind == "wheel":
        pip(interpreter, "install", "--no-deps", str(wheel))
    else:
        pip(interpreter, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    (tmp_path / "app.py").write_text(APP)
    env = {**clean_environment(), "PYTHONPATH": "", "PYTHONWARNINGS": "error"}
    plugins = run([interpreter, "app.py", "--info", "plugins"], tmp_path, env=env)
    assert plugins.code == 0, plugins.text
    assert "HydraParallelism" in plugins.text
    listed = run([interpreter, "app.py", "--help"], tmp_path, env=env)
    assert "parallelism: cfg, ddp, default, ep, fsdp," in listed.text, listed.text
    for group in ("context_parallel: ring, ulysses, usp", "fsdp: bf16, offload", "pipeline: 1f1b, gpipe, interleaved_1f1b"):
        assert f"parallelism/{group}" in listed.text
    completed = run([interpreter, "app.py", "-sc", "query=bash"], tmp_path, env={
        **env, "COMP_LINE": "app.py parallelism=fs", "COMP_POINT": "21",
    })  # fmt: skip
    assert "parallelism=fsdp_tp" in completed.text, completed.text


def test_what_the_wheel_holds(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "hydra_plugins/__init__.py" not in names, "would shadow every other plugin"
    assert "hydra_plugins/hydra_parallelism/__init__.py" in names
    assert "hydra_parallelism/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "examples", "conf", "benchmarks"))]
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[hydra.plugins]\nhydra_parallelism = hydra_plugins.hydra_parallelism.discovery:HydraParallelism" in text
