"""What may import what, what an import costs, and which names are public."""

import ast
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_parallelism
from hydra_parallelism import ConfigurationError, LaunchError, ParallelismError

ROOT = Path(hydra_parallelism.__file__).parents[1]
WITHOUT_TORCH = (
    "errors", "balance", "config", "launcher_config", "_equation",
    "topology", "constraints", "swept_axes", "layouts", "sweeper_config", "world", "simulation",
    "_answers", "resolvers", "store", "interpolations", "failures", "logs", "memory", "worker", "outcome", "results",
    "ranking", "pictures", "progress",
)  # fmt: skip
"""Everything that Hydra imports on its own account is here, and what the callback needs before a job starts."""
ORDER = (
    *WITHOUT_TORCH,
    "_compat", "fake_groups", "holdings",
    "census", "local_rendezvous", "launch", "slots", "rendezvous", "agreement", "device", "options", "mesh",
    "runtime", "record", "run_folder", "run_mode", "dry_run", "multirun", "callback", "best", "sweep_plan", "sweep_jobs",
    "sweep",
    "gradients", "moe", "data_loading", "_checkpoint_files", "_checkpoint_state", "checkpoint", "guidance",
)  # fmt: skip
"""Each of these may import those before it."""
ON_TOP = ("_checkpoint_state", "checkpoint", "guidance")
"""These know what ``parallelize`` returns, too."""
TELLERS = ("record", "dry_run", "multirun", "best", "sweep_plan")
"""These show a report of ``plan``, or ask it what a layout costs."""
PARALLELIZE = (
    "recipe", "inference", "blocks", "packed", "styles", "plans", "sequence", "tensor", "recompute", "data", "dispatch",
    "experts", "weights", "stages", "stand_ins", "units", "flow", "part", "merge", "relay", "schedule", "pipeline", "steps",
    "trial", "pretrained", "mixing", "reroute", "order",
)  # fmt: skip
"""Modules of ``parallelize``, likewise; of the rest they may import all up to ``runtime``, and none of that imports them."""
CONTEXT_PARALLEL = ("layout", "kernels", "ring", "ulysses", "attention", "shards")
"""Modules of ``context_parallel``, likewise; ``parallelize`` may import them, and they nothing of it."""
PLAN = (
    "machine", "model", "shortcut", "overrides", "case", "composition", "placement", "advice", "report", "schedules", "share",
    "memory", "collectives", "traffic", "duration", "price", "rank", "module", "text", "grid", "colours", "drawing", "page",
    "output", "cli", "__main__",
)  # fmt: skip
"""Modules of ``plan``, likewise; none imports torch, and of the rest they may import only what does not either."""
INTEROP = (
    "ours", "fields",
    "transformers", "lerobot", "accelerate", "torchtitan", "diffusers", "lightning", "nemo",
    "meshes", "table",
)  # fmt: skip
"""Modules of ``interop``, likewise: targets know only what is before the first of them, and import no library of theirs."""
DOCTOR = ("findings", "software", "surroundings", "rehearsal", "task", "cli")
"""Modules of ``doctor``, likewise; none imports torch before it looks at it."""
DOORBELL = sorted((ROOT / "hydra_plugins").rglob("*.py"))
RUNTIME = (
    "MoE", "ParallelContext", "accumulate", "attention", "average_loss", "clip_grad_norm_", "current", "distributed_sampler",
    "export", "forward_backward", "guided", "init", "load", "parallel_context", "parallelize", "save", "seed_for",
    "shard_sequence", "shutdown", "unshard_sequence",
)  # fmt: skip


def _siblings(path: Path, level: int = 1) -> set[str]:
    """Modules of the package that a module imports, wherever in it; with ``level=2`` those of the package around its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == level:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hydra_parallelism":
            found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hydra_parallelism.")}
    return found


def _third_parties(path: Path) -> set[str]:
    """Top-level packages that importing a module imports directly: everything outside functions."""
    found: set[str] = set()
    open_nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            open_nodes += ast.iter_child_nodes(node)
    return found


def _module(name: str) -> Path:
    return ROOT / "hydra_parallelism" / f"{name}.py"


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_one_way(name: str) -> None:
    above = {"parallelize"} if name in ON_TOP else {"plan"} if name in TELLERS else set()
    assert _siblings(_module(name)) <= set(ORDER[: ORDER.index(name)]) | above


@pytest.mark.parametrize("name", PARALLELIZE)
def test_imports_within_parallelize_point_one_way(name: str) -> None:
    path = ROOT / "hydra_parallelism" / "parallelize" / f"{name}.py"
    assert _siblings(path) <= set(PARALLELIZE[: PARALLELIZE.index(name)])
    assert _siblings(path, level=2) <= {*ORDER[: ORDER.index("runtime") + 1], "context_parallel"}
    module = importlib.import_module(f"hydra_parallelism.parallelize.{name}")
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", CONTEXT_PARALLEL)
def test_imports_within_context_parallel_point_one_way(name: str) -> None:
    path = ROOT / "hydra_parallelism" / "context_parallel" / f"{name}.py"
    assert _siblings(path) <= set(CONTEXT_PARALLEL[: CONTEXT_PARALLEL.index(name)])
    assert _siblings(path, level=2) <= set(ORDER[: ORDER.index("runtime") + 1])
    module = importlib.import_module(f"hydra_parallelism.context_parallel.{name}")
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", PLAN)
def test_imports_within_plan_point_one_way_and_need_no_torch(name: str) -> None:
    path = ROOT / "hydra_parallelism" / "plan" / f"{name}.py"
    assert _siblings(path) <= set(PLAN[: PLAN.index(name)])
    above = {"parallelize"} if name == "module" else set()  # within functions, when there is a module to read
    above |= {"doctor"} if name == "cli" else set()
    assert _siblings(path, level=2) <= set(WITHOUT_TORCH) | above
    assert not {"torch", "numpy", "rich"} & _third_parties(path)


@pytest.mark.parametrize("name", INTEROP)
def test_imports_within_interop_point_one_way_and_need_no_other_library(name: str) -> None:
    path = ROOT / "hydra_parallelism" / "interop" / f"{name}.py"
    assert _siblings(path) <= set(INTEROP[: INTEROP.index(name)])
    live = {"_compat", "runtime"} if name == "meshes" else set()
    assert _siblings(path, level=2) <= {*WITHOUT_TORCH, *live}
    assert _third_parties(path) <= {*sys.stdlib_module_names, "omegaconf"}
    module = importlib.import_module(f"hydra_parallelism.interop.{name}")
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", DOCTOR)
def test_imports_within_doctor_point_one_way_and_need_no_torch(name: str) -> None:
    path = ROOT / "hydra_parallelism" / "doctor" / f"{name}.py"
    assert _siblings(path) <= set(DOCTOR[: DOCTOR.index(name)])
    assert _siblings(path, level=2) <= {*WITHOUT_TORCH, *({"runtime"} if name == "task" else ())}
    assert "torch" not in _third_parties(path)


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("parallelize", PARALLELIZE),
        ("context_parallel", CONTEXT_PARALLEL),
        ("plan", PLAN),
        ("interop", INTEROP),
        ("doctor", DOCTOR),
    ],
)
def test_every_module_of_a_package_has_its_place(package: str, modules: tuple[str, ...]) -> None:
    assert {path.stem for path in (ROOT / "hydra_parallelism" / package).glob("*.py")} == {*modules, "__init__"}


@pytest.mark.parametrize(
    "path",
    [*map(_module, (*WITHOUT_TORCH, "launch", "slots", "run_mode", "dry_run", "multirun", "callback", "__init__")), *DOORBELL],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_nothing_that_hydra_imports_imports_torch(path: Path) -> None:
    assert "torch" not in _third_parties(path)


def test_every_module_has_its_place() -> None:
    present = {path.stem for path in (ROOT / "hydra_parallelism").glob("*.py")}
    assert present == {*ORDER, "__init__", "_local_rank", "_preload"}


def test_config_imports_neither_torch_nor_hydra() -> None:
    assert _third_parties(_module("config")) == {"dataclasses", "enum", "typing"}


def test_the_plugin_folder_is_a_namespace_shared_with_others() -> None:
    assert DOORBELL
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()


def _loaded(*modules: str) -> set[str]:
    """Top-level packages in a fresh interpreter after importing some modules."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert child.returncode == 0, child.stderr
    return set(child.stdout.split())


def test_discovery_leaves_torch_alone() -> None:
    loaded = _loaded(
        "hydra_parallelism",
        "hydra_parallelism.store",
        "hydra_parallelism.callback",
        "hydra_plugins.hydra_parallelism.discovery",
    )
    assert "omegaconf" in loaded
    assert not {"torch", "numpy"} & loaded


def test_public_names_that_need_no_torch_load_without_it() -> None:
    names = sorted(set(hydra_parallelism.__all__) - set(RUNTIME))
    code = f"import sys; from hydra_parallelism import {', '.join(names)}; print('torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert (child.stdout, child.stderr) == ("False\n", "")


def test_public_names_are_sorted_and_listed() -> None:
    assert hydra_parallelism.__all__ == sorted(hydra_parallelism.__all__)
    assert set(dir(hydra_parallelism)) >= set(hydra_parallelism.__all__)


@pytest.mark.parametrize("name", hydra_parallelism.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(hydra_parallelism, name).__module__.startswith("hydra_parallelism.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hydra_parallelism' has no attribute 'Mesh'"):
        _ = hydra_parallelism.Mesh


@pytest.mark.parametrize("name", ORDER)
def test_a_module_lists_what_it_offers(name: str) -> None:
    module = importlib.import_module(f"hydra_parallelism.{name}")
    if not name.startswith("_"):
        assert module.__all__ == sorted(module.__all__)
        assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("kind", "also"), [(ParallelismError, Exception), (ConfigurationError, ValueError), (LaunchError, RuntimeError)]
)
def test_exceptions_survive_pickling(kind: type[ParallelismError], also: type[Exception], protocol: int) -> None:
    error = pickle.loads(pickle.dumps(kind("parallelism does not fit:\n  try: tp_size=2"), protocol))
    assert type(error) is kind
    assert isinstance(error, (ParallelismError, also))
    assert isinstance(error, also)
    assert str(error) == "parallelism does not fit:\n  try: tp_size=2"


def test_a_job_without_dtensors_does_not_import_them() -> None:
    """They bring torch's compiler with them when the job ends: seconds of every rank, and a folder in the temporary one."""
    code = "import sys, hydra_parallelism.runtime; print('torch.distributed.tensor' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.stdout == "False\n", child.stderr
