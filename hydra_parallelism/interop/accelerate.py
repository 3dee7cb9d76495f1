"""accelerate's ``ParallelismConfig``. The mesh that goes with it is :func:`~.meshes.accelerate_mesh`.

Its context axis ``cp`` is torch's ring, its ``sp`` is Ulysses in DeepSpeed; it refuses both together. The sizes that it is not
told it reads from the environment, so :func:`to_accelerate` says all of them.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, own_plan, read_theirs, take
from .ours import Ours, build, read_ours

__all__ = ["TARGET", "from_accelerate", "to_accelerate"]

_NO_AXIS = "accelerate has no such axis"
_PLUGIN = "accelerate keeps it in FullyShardedDataParallelPlugin, not here"
_TUNING = "a choice inside accelerate, which is no key here"

TARGET = Target(
    name="ParallelismConfig",
    library="accelerate",
    version="1.15.0",
    fields=(
        Field("dp_replicate_size", "dp_replicate"),
        Field("dp_shard_size", "dp_shard"),
        Field("tp_size", "tp_size"),
        Field("cp_size", "context_parallel.ring_degree", "not together with sp_size"),
        Field("cp_backend", None, _TUNING, default="torch"),
        Field("sp_size", "context_parallel.ulysses_degree", "DeepSpeed's, without a mesh; not together with cp_size"),
        Field("sp_backend", None, _TUNING, default="deepspeed"),
        Field("tp_handler.enable_async_tp", None, _TUNING, default=False),
        Field("cp_handler.cp_comm_strategy", None, _TUNING, default="allgather"),
        Field("sp_handler.sp_seq_length", None, _TUNING),
        Field("sp_handler.sp_seq_length_is_variable", None, _TUNING, default=True),
        Field("sp_handler.sp_attn_implementation", None, _TUNING, default="sdpa"),
        Field(None, "tp_plan", "the plan that Transformers loaded the model with", out=own_plan),
    ),
    cannot={
        "pp_size": _NO_AXIS,
        "cfg_parallel": _NO_AXIS,
        "ep_size": _NO_AXIS,
        "ep_plan": _NO_AXIS,
        "pipeline.": _NO_AXIS,
        "enable_sequence_parallel": "accelerate leaves the tensor axis to the model's own plan",
        "context_parallel.load_balance": "accelerate always balances its ring",
        "activation_checkpointing": _PLUGIN,
        "fsdp.": _PLUGIN,
    },
)

_BEHIND = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "an Accelerator without parallelism_config takes sizes from PARALLELISM_CONFIG_*",
    "ACCELERATE_USE_FSDP": "an Accelerator without fsdp_plugin shards as FSDP_* say",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "it wins over Accelerator(gradient_accumulation_steps=...)",
}
"""Variables that ``accelerate launch`` sets and what an ``Accelerator`` does on their account, whatever the config says."""


def to_accelerate(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of accelerate's ``ParallelismConfig``, every size included.

    Args:
        config: A config, a topology or a running context.
        world_size: How many processes, where the config leaves a degree open.

    Raises:
        ConfigurationError: accelerate cannot express something that is set; all such keys at once.

    Warns:
        UserWarning: The environment has variables that configure accelerate behind the config's back.
    """
    ours = read_ours(config, world_size=world_size)
    given = give(TARGET, ours)
    _check_together(ours)
    for text in _behind_the_back(os.environ):
        warnings.warn(text, UserWarning, stacklevel=2)
    return given


def from_accelerate(source: Any) -> ParallelismConfig:
    """accelerate's ``ParallelismConfig``, or a mapping or JSON file with its fields, as ours.

    Raises:
        ConfigurationError: Not such a thing, or something that we cannot express.
    """
    return build(take(TARGET, read_theirs(TARGET, source)))


def _check_together(ours: Ours) -> None:
    """Refuse what accelerate refuses of sizes that are fine one by one."""
    key = ours.key
    size = {name: ours[name] for name in ("ring", "ulysses", "dp_replicate", "dp_shard", "tp")}
    if size["ring"] > 1 and size["ulysses"] > 1:
        raise ConfigurationError(
            f"accelerate {TARGET.name} has cp_size or sp_size, not both, but {key}.context_parallel.ring_degree={size['ring']} "
            f"and {key}.context_parallel.ulysses_degree={size['ulysses']}\n"
            f"  try: {key}.context_parallel.ring_degree={size['ring'] * size['ulysses']} "
            f"{key}.context_parallel.ulysses_degree=1"
        )
    inner = {f"{key}.tp_size": size["tp"], f"{key}.context_parallel.ring_degree": size["ring"]}
    used = " and ".join(f"{name}={n}" for name, n in inner.items() if n > 1)
    if used and size["dp_replicate"] > 1 and size["dp_shard"] == 1:
        n = size["dp_replicate"]
        raise ConfigurationError(
            f"accelerate {TARGET.name} has no replicas without shards beside {used}: {key}.dp_replicate={n}, {key}.dp_shard=1\n"
            f"  try: {key}.dp_replicate=1 {key}.dp_shard={n}"
        )


def _behind_the_back(environ: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for name, effect in _BEHIND.items():
        value = environ.get(name, "")
        idle = ("", "1") if name.endswith("STEPS") else ("", "0", "false", "no", "off", "n", "f")
        if value.lower() not in idle:
            found.append(f"{name}={value} configures accelerate behind the config's back: {effect}\n  try: unset {name}")
    return found
