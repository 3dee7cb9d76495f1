"""What is installed, and whether Hydra finds it."""

import platform
import warnings
from collections.abc import Iterator
from importlib import metadata

from .. import world
from .findings import Finding, bad, ok, warn

__all__ = ["accelerators", "backends", "plugin", "versions"]

_PACKAGES = ("hydra-core", "omegaconf", "torch")
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def versions() -> Iterator[Finding]:
    """Python and the packages, against what this package says it works with."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        about = metadata.metadata("hydra-parallelism")
    except metadata.PackageNotFoundError:
        yield bad("hydra-parallelism is not installed, so Hydra 1.4 does not find it by its entry point", "pip install .")
        return
    yield ok(f"hydra-parallelism {about['Version']}")
    yield _judge("python", platform.python_version(), SpecifierSet(about["Requires-Python"] or ""))
    wanted = {need.name: need.specifier for need in map(Requirement, metadata.requires("hydra-parallelism") or ())}
    for name in _PACKAGES:
        try:
            yield _judge(name, metadata.version(name), wanted.get(name, SpecifierSet()))
        except metadata.PackageNotFoundError:
            yield bad(f"{name} is not installed", f"pip install '{name}{wanted.get(name, '')}'")


def _judge(name: str, version: str, wanted: "object") -> Finding:
    from packaging.specifiers import SpecifierSet

    assert isinstance(wanted, SpecifierSet)
    if wanted.contains(version, prereleases=True):
        return ok(f"{name} {version} (needs {wanted or 'any'})")
    return bad(f"{name} {version} is not {wanted}", f"pip install '{name}{wanted}'" if name != "python" else "another Python")


def plugin() -> Iterator[Finding]:
    """Whether Hydra finds this plugin, and what else it stumbles over: one broken plugin breaks every app."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            names = {found.__name__ for found in Plugins.instance().discover(Launcher)}
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            yield bad(f"a plugin of Hydra breaks every app: {type(error).__name__}: {error}", "uninstall or repair it")
            return
    for warning in caught:
        text = " ".join(str(warning.message).split())
        if "plugin" in text.lower():
            yield warn(f"Hydra skips a plugin: {text}", "uninstall or repair it")
    if "TorchrunLauncher" in names:
        yield ok("Hydra finds the plugin (hydra/launcher=torchrun)")
    else:
        yield bad(
            "Hydra does not find this plugin: no hydra/launcher=torchrun", "pip install . into the environment of your app"
        )


def accelerators() -> Iterator[Finding]:
    """CUDA devices, as torch and as the driver sees them."""
    import os

    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    said = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = world.count_accelerators()
    if count:
        names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
        yield ok(f"{count} CUDA device(s): {names}{said}")
    elif known:
        yield bad(
            f"the driver shows {known} device(s){said}, but torch {torch.__version__} uses none",
            "a build of torch for CUDA that the driver supports, see nvidia-smi",
        )
    elif chosen is not None and world.count_accelerators({}):
        yield warn(f"all accelerators are hidden{said}", "unset CUDA_VISIBLE_DEVICES")
    else:
        yield ok(f"no accelerator{said}: ranks compute on the CPU")


def backends() -> Iterator[Finding]:
    """Which backends this torch has."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield bad(f"torch {torch.__version__} is built without torch.distributed", "another build of torch")
        return
    found = [name for name in _BACKENDS if dist.is_backend_available(name)]
    if "gloo" not in found:
        yield bad(f"backends: {', '.join(found) or 'none'}, and no gloo", "another build of torch")
    elif torch.cuda.is_available() and "nccl" not in found:
        yield bad(f"backends: {', '.join(found)}, and no nccl for the CUDA devices", "another build of torch")
    else:
        yield ok(f"backends: {', '.join(found)}")
