"""The config of ``hydra/launcher=torchrun``, with torchrun's own option names."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["TorchrunConfig"]


@dataclass
class TorchrunConfig:
    """How local processes are started. Used by every job of a sweep, and by a plain run that nobody launched."""

    _target_: str = "hydra_plugins.hydra_parallelism.torchrun_launcher.TorchrunLauncher"
    nproc_per_node: Any = "auto"
    """Processes on this node. ``auto``: what the job's own degrees ask for, else the visible accelerators, else 1."""
    nnodes: int = 1
    """Nodes of a plain run; start the same command on each. A sweep runs on one."""
    node_rank: int = 0
    """Which of them this is; only used by the ``static`` rendezvous."""
    rdzv_backend: str = "c10d"
    """Rendezvous of several nodes: ``c10d``, or ``static`` with ``node_rank``."""
    rdzv_endpoint: str = ""
    """``HOST:PORT`` where the nodes meet; needed when ``nnodes > 1``. One node takes a free port by itself."""
    rdzv_id: str | None = None
    """Name of the job, equal on all nodes; needed when ``nnodes > 1``."""
    rdzv_conf: dict[str, Any] = field(default_factory=dict)
    """Further rendezvous options, e.g. ``{timeout: 900}``."""
    local_addr: str | None = None
    """Address of this node for the others; ``null`` looks it up."""
    max_restarts: int = 0
    """How often the processes are started again after a failure, in the same output folder."""
    monitor_interval: float = 0.05
    """Seconds between two looks at the processes."""
    log_dir: str | None = None
    """Where torch's agent keeps the streams that it redirects; ``null`` is a temporary folder."""
    redirects: str | None = None
    """Which streams go to files in ``log_dir``, as torchrun spells it (``3``, ``0:1,1:2``); ``null``: of all but rank 0."""
    tee: str | None = None
    """Which streams go to the console and to files in ``log_dir``, spelled alike."""
    omp_num_threads: int | None = None
    """``OMP_NUM_THREADS`` of each process; ``null`` keeps the variable, and is 1 where it is not set."""
    shutdown_timeout: int = 5
    """Seconds that processes have to end after a signal before they are killed."""
    max_parallel_jobs: int = 1
    """Jobs of a sweep at a time. Each gets accelerators of its own (``CUDA_VISIBLE_DEVICES``)."""
    cpu_slots: int | None = None
    """Processes of parallel jobs at a time on a machine without accelerators; ``null``: as many as cores."""
