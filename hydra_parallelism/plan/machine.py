"""The machine of a plan: nodes of equal accelerators, joined by one kind of link inside a node and one between nodes.

Bandwidths are those of one accelerator in one direction, as a collective sees them; data sheets add both directions, so
NVLink's "900 GB/s" is 450 here. Speeds are those of dense matrix products in bfloat16; data sheets that give them "with
sparsity" say twice as much. Latencies are the ones NCCL's own cost model has for a step of a ring under its Simple protocol
(``hwLat`` in its ``src/graph/tuning.cc``, as of the releases that know Hopper: NVLink 3.4, PCIe 5.7, network 14 microseconds).

Ranks fill nodes in order: rank ``r`` is on node ``r // per_node``, as torchrun and Slurm's block distribution place them.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

from ..errors import ConfigurationError

__all__ = ["MACHINES", "Link", "Machine", "MachineConfig", "read_machine"]


@dataclass
class MachineConfig:
    """The ``world`` node of a plan."""

    nodes: Optional[int] = None  # noqa: UP045  (OmegaConf reads it)
    """Number of nodes. ``null`` is as many as the degrees need, and one if a degree is ``-1``."""
    per_node: int = 8
    """Accelerators of a node, each with one rank."""
    memory_gb: float = 80.0
    """Memory of an accelerator, in 1e9 bytes."""
    intra_gb_s: float = 450.0
    """Bandwidth between accelerators of a node: 1e9 bytes a second, per accelerator and direction."""
    inter_gb_s: float = 50.0
    """Bandwidth between nodes: 1e9 bytes a second, per accelerator and direction."""
    intra_us: float = 3.4
    """Latency of a message inside a node, in microseconds."""
    inter_us: float = 14.0
    """Latency of a message between nodes, in microseconds."""
    tflops: float = 989.0
    """Speed of an accelerator's dense matrix products in bfloat16, in 1e12 floating point operations a second."""
    efficiency: float = 0.5
    """Share of ``tflops`` that computing reaches. Whole steps reached 0.42 to 0.54 of 2,240 A100 (Korthikanti et al. 2022,
    arXiv 2205.05198, abstract)."""


MACHINES: dict[str, tuple[dict[str, Any], str]] = {
    "dgx_h100": (
        {},
        "NVIDIA DGX H100 data sheet: 8 x 80 GB, NVLink 900 GB/s both ways, 8 single-port ConnectX-7 of 400 Gb/s; "
        "H100 SXM data sheet: 1,979 TFLOPS of BF16 with sparsity, 989 dense",
    ),
    "dgx_h200": (
        {"memory_gb": 141.0},
        "NVIDIA DGX H200 data sheet: 8 x 141 GB, NVLink 900 GB/s both ways, 8 single-port ConnectX-7 of 400 Gb/s; "
        "H200 SXM data sheet: 1,979 TFLOPS of BF16 with sparsity, 989 dense",
    ),
    "dgx_b200": (
        {"memory_gb": 180.0, "intra_gb_s": 900.0, "tflops": 2250.0},
        "NVIDIA DGX B200 data sheet: 8 x 180 GB, NVLink 1.8 TB/s both ways, 8 ConnectX-7 of 400 Gb/s; "
        "HGX B200 data sheet: 4.5 PFLOPS of BF16 with sparsity for each, 2.25 dense",
    ),
    "dgx_a100": (
        {"intra_gb_s": 300.0, "inter_gb_s": 25.0, "tflops": 312.0},
        "NVIDIA DGX A100 data sheet: 8 x 80 GB, NVLink 600 GB/s both ways, 8 ConnectX-6 of 200 Gb/s; "
        "A100 data sheet: 312 TFLOPS of BF16, dense",
    ),
    "gb200_nvl72": (
        {"per_node": 72, "memory_gb": 186.0, "intra_gb_s": 900.0, "tflops": 2500.0},
        "NVIDIA GB200 NVL72: a node is the NVLink domain of a rack, 72 x 186 GB, NVLink 130 TB/s both ways for all, one "
        "ConnectX-7 of 400 Gb/s for each; 5 PFLOPS of BF16 with sparsity for each, 2.5 dense",
    ),
    "aws_p4d": (
        {"memory_gb": 40.0, "intra_gb_s": 300.0, "inter_gb_s": 6.25, "tflops": 312.0},
        "Amazon EC2 p4d.24xlarge: 8 A100 of 40 GB, NVSwitch 600 GB/s both ways, 400 Gb/s of EFA for all 8",
    ),
    "aws_p5": (
        {},
        "Amazon EC2 p5.48xlarge: 8 H100 of 80 GB, NVSwitch 900 GB/s both ways, 3,200 Gb/s of EFA for all 8",
    ),
    "pcie": (
        {"per_node": 4, "memory_gb": 24.0, "intra_gb_s": 31.5, "inter_gb_s": 1.25, "intra_us": 5.7, "tflops": 125.0},
        "PCI Express 4.0, 16 lanes: 16 GT/s, 128b/130b coding; between nodes 10 Gb/s Ethernet for each accelerator; "
        "NVIDIA A10 data sheet: 24 GB, 125 TFLOPS of BF16, dense",
    ),
}
"""Name -> what it sets on top of the defaults, which are a DGX H100's, and where its numbers come from."""


@dataclass(frozen=True)
class Link:
    """What a message costs: ``latency_s + bytes / bytes_per_s`` (the alpha-beta model)."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """A machine whose number of nodes is known."""

    nodes: int
    per_node: int
    memory: float
    """Bytes of one accelerator."""
    intra: Link
    inter: Link
    flops: float
    """Operations a second of one accelerator, at its best."""
    efficiency: float
    """Share of that which computing reaches."""

    @property
    def accelerators(self) -> int:
        """nodes * per_node."""
        return self.nodes * self.per_node

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.per_node

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link that a collective over these ranks, in ascending order, has to use."""
        return self.intra if self.node(ranks[0]) == self.node(ranks[-1]) else self.inter


def read_machine(config: MachineConfig, world_size: int, key: str = "world") -> Machine:
    """Judge the node and count the nodes.

    Args:
        config: What the user wrote.
        world_size: Ranks that need a place; how many nodes there are if ``config.nodes`` does not say.
        key: Dotted path of the node, for messages.

    Raises:
        ConfigurationError: Names every value that is not above 0.
    """
    problems = [
        f"{key}.{name}={value}: must be {'above 0' if math.isfinite(value) else 'a number above 0'}"
        for name, value in vars(config).items()
        if value is not None and not 0 < value < math.inf  # nan is none of it
    ]
    if config.efficiency > 1:
        problems.append(f"{key}.efficiency={config.efficiency}: must be at most 1, a share of {key}.tflops")
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    return Machine(
        config.nodes or -(-world_size // config.per_node),
        config.per_node,
        config.memory_gb * 1e9,
        Link(config.intra_us * 1e-6, config.intra_gb_s * 1e9),
        Link(config.inter_us * 1e-6, config.inter_gb_s * 1e9),
        config.tflops * 1e12,
        config.efficiency,
    )
