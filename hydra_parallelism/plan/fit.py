"""Whether a model can be split as a layout wants: what ``parallelize`` would refuse, told before anything is priced. Pure."""

import re

from ..constraints import ModelConstraints, violations
from ..errors import ConfigurationError
from .case import Case
from .model import Model
from .schedules import stages_per_rank

__all__ = ["check_fit", "misfits"]

_NAMES = {"num_heads": "heads", "num_kv_heads": "kv_heads", "seq_len": "sequence", "num_experts": "experts"}


def misfits(case: Case, model: Model, key: str = "model") -> list[str]:
    """One reason for each number of the model that the layout cannot split; empty when it fits.

    Heads, sequence and experts as in :mod:`~hydra_parallelism.constraints`. A pipeline needs a block for each stage, and stages
    share no parameters.
    """
    at, config = case.topology, case.config
    limits = ModelConstraints(
        num_heads=model.heads,
        num_kv_heads=model.kv_heads if model.kv_heads != model.heads else None,
        seq_len=model.sequence,
        num_experts=model.experts if model.experts > 1 else None,
    )
    found = [_spell(reason, key) for reason in violations(at, limits, config.enable_sequence_parallel)]
    count = stages_per_rank(config.pipeline.schedule.name)
    if at.pp > 1 and model.layers < at.pp * count:
        found.append(
            f"{key}.layers={model.layers} is less than pp_size={at.pp} * {count} stage(s) of {config.pipeline.schedule.name}"
        )
    if at.pp > 1 and model.tied:
        found.append(f"{key}.tied=true: with pp_size={at.pp} embedding and head are in two stages, which share no parameters")
    return found


def check_fit(case: Case, model: Model, key: str = "model") -> None:
    """Refuse a model that the layout cannot split.

    Raises:
        ConfigurationError: Names all of :func:`misfits`.
    """
    found = misfits(case, model, key)
    if found:
        raise ConfigurationError("\n  ".join([f"{key} does not fit the layout:", *found]))


def _spell(reason: str, key: str) -> str:
    """With the names that the model's node has for the numbers."""
    return re.sub(rf"^({'|'.join(_NAMES)})=", lambda match: f"{key}.{_NAMES[match[1]]}=", reason)
