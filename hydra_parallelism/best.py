"""The best layouts of a sweep by estimate: what ``hydra.sweeper.top`` keeps of those that could run.

The estimates are those of ``hydra-parallelism plan --rank``, for the model and the machine of ``hydra.sweeper.plan``.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import ParallelismConfig
from .errors import ConfigurationError
from .plan.case import Case
from .plan.machine import MachineConfig, read_machine
from .plan.model import Model, ModelConfig, read_model
from .plan.rank import Estimate, estimate, need_work
from .sweeper_config import LayoutsConfig
from .topology import Topology

__all__ = ["Estimator", "read_estimator"]

_KEY = "hydra.sweeper.plan"


@dataclass(frozen=True)
class Estimator:
    """What is estimated with."""

    model: Model
    machine: MachineConfig

    def judge(self, topology: Topology, node: Any) -> Estimate:
        """Price a layout under the policies of a config node.

        Raises:
            ConfigurationError: The model does not go with it, or it does not fit into memory.
        """
        plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        merged = OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
        policies: ParallelismConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
        machine = read_machine(self.machine, topology.world_size, f"{_KEY}.world")
        found = estimate(Case(topology, machine, policies, False), self.model)
        if found.memory.device > machine.memory:
            needed = f"a rank needs {found.memory.device / 1e9:,.1f} GB by estimate"
            raise ConfigurationError(f"{needed}, but {_KEY}.world.memory_gb={self.machine.memory_gb:g}")
        return found


def read_estimator(options: LayoutsConfig) -> Estimator | None:
    """Read what a sweep says of its model and machine; ``None`` when it does not ask for the best.

    Raises:
        ConfigurationError: ``top`` is out of range, goes with ``max_jobs``, or the model is not described.
    """
    if options.top is None:
        return None
    if options.top < 1:
        raise ConfigurationError(f"hydra.sweeper.top={options.top}: must be at least 1, or null for all")
    if options.max_jobs is not None:
        raise ConfigurationError(
            f"hydra.sweeper.top={options.top} and hydra.sweeper.max_jobs={options.max_jobs}: the best are not among the first\n"
            "  try: hydra.sweeper.max_jobs=null"
        )
    model = read_model(_read(ModelConfig, options.plan.model, "model"), f"{_KEY}.model")
    machine: MachineConfig = _read(MachineConfig, options.plan.world, "world")
    read_machine(machine, 1, f"{_KEY}.world")
    return Estimator(need_work(model, f"hydra.sweeper.top={options.top}", f"{_KEY}.model"), machine)


def _read(kind: Any, given: dict[str, Any], name: str) -> Any:
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), given))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{_KEY}.{name} is not valid: {str(error).splitlines()[0]}") from None
