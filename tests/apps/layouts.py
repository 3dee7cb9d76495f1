"""The layouts that must train as one process does, by world size. Imports no torch: the tests list them too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Case:
    """One layout, trained once."""

    name: str
    config: dict[str, Any]
    model: str = "gpt"
    optimizer: str = "sgd"
    trick: str = ""
    """What is done differently: ``seeds``, ``meta``, ``vocabulary``, or a mistake that must be noticed."""


_TP = {"tp_plan": "auto"}
_SP = {**_TP, "enable_sequence_parallel": True}

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}, "one_tp": _TP, "one_sp": _SP},
    2: {
        "ddp2": {},
        "fsdp2": {"dp_shard": 2},
        "tp2": {"tp_size": 2, **_TP},
        "tp2_sp": {"tp_size": 2, **_SP},
    },
    3: {
        "fsdp3": {"dp_shard": 3},
        "tp3": {"tp_size": 3, **_TP},
        "tp3_sp": {"tp_size": 3, **_SP},
    },
    4: {
        "ddp4": {"dp_replicate": 4},
        "fsdp4": {"dp_shard": 4},
        "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
        "tp4": {"tp_size": 4, **_TP},
        "tp4_sp": {"tp_size": 4, **_SP},
        "fsdp2_tp2": {"dp_shard": 2, "tp_size": 2, **_TP},
        "fsdp2_tp2_sp": {"dp_shard": 2, "tp_size": 2, **_SP},
        "replicate2_tp2": {"dp_replicate": 2, "tp_size": 2, **_TP},
        "replicate2_tp2_sp": {"dp_replicate": 2, "tp_size": 2, **_SP},
    },
    8: {
        "ddp8": {"dp_replicate": -1},
        "fsdp8": {"dp_shard": -1},
        "hsdp2x4": {"dp_replicate": 2, "dp_shard": 4},
        "fsdp4_tp2": {"dp_shard": 4, "tp_size": 2, **_TP},
        "fsdp4_tp2_sp": {"dp_shard": 4, "tp_size": 2, **_SP},
        "fsdp2_tp4_sp": {"dp_shard": 2, "tp_size": 4, **_SP},
        "hsdp2x2_tp2": {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2, **_TP},
        "hsdp2x2_tp2_sp": {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2, **_SP},
    },
}
"""World size -> layout -> config."""

_GATHERED = {
    "tp_plan": {"layers.*.attention.[qkv]_proj": "colwise_rep", "layers.*.attention.o_proj": "rowwise_rep"},
    "tp_size": 2,
}
"""Every output whole again, as in Transformers' plan for Phi-3."""

_VOCABULARY = {"tp_plan": {"head": "colwise_vocab"}}

EXTRAS: dict[int, list[Case]] = {
    1: [Case("one_recompute", {"activation_checkpointing": "full"})],
    2: [
        Case("fsdp2_meta", {"dp_shard": 2}, trick="meta"),
        Case("tp2_meta", {"tp_size": 2, **_TP}, "llama", trick="meta"),
        Case("tp2_vocabulary", {"tp_size": 2, **_TP, **_VOCABULARY}, trick="vocabulary"),
        Case("tp2_vocabulary_sp", {"tp_size": 2, **_SP, **_VOCABULARY}, trick="vocabulary"),
        Case("tp2_gathered", _GATHERED),
        Case("tp2_gathered_sp", {**_GATHERED, "enable_sequence_parallel": True}),
        Case("fsdp2_recompute", {"dp_shard": 2, "activation_checkpointing": "full"}),
        Case("fsdp2_recompute2", {"dp_shard": 2, "activation_checkpointing": 2}, "odd"),
        Case("tp2_sp_recompute", {"tp_size": 2, **_SP, "activation_checkpointing": "full"}, "llama"),
        Case("fsdp2_kept", {"dp_shard": 2, "fsdp": {"reshard_after_forward": False}}),
        Case("fsdp2_offload", {"dp_shard": 2, "fsdp": {"cpu_offload": True}}),
        Case("fsdp2_wrap", {"dp_shard": 2, "fsdp": {"wrap": ["MLP", "layers.*.attention", "Block"]}}),
        Case("ddp2_seeds", {"dp_replicate": 2}, trick="seeds"),
        Case("tp2_seeds", {"tp_size": 2, **_TP}, trick="seeds"),
    ],
    4: [
        Case("fsdp2_tp2_sp_recompute", {"dp_shard": 2, "tp_size": 2, **_SP, "activation_checkpointing": 2}, "llama", "adamw"),
        Case("fsdp2_tp2_sp_meta", {"dp_shard": 2, "tp_size": 2, **_SP}, "llama", trick="meta"),
        Case("replicate2_tp2_offload", {"dp_replicate": 2, "tp_size": 2, **_TP, "fsdp": {"cpu_offload": True}}),
    ],
}

MISTAKES: dict[int, list[Case]] = {
    2: [
        Case("nobody_reduces", {}, trick="unreduced"),
        Case("heads_not_summed", {"tp_size": 2, "tp_plan": {"layers.*.self_attn.[qk]_norm": "replicate"}}, "llama"),
    ],
}
"""Wrong on purpose: the comparison must say so."""


def cases(size: int) -> Iterator[Case]:
    """Every case of a world size: both optimizers on the GPT, one each on the other models where they have something to add."""
    for name, config in LAYOUTS[size].items():
        tensor = config.get("tp_size", 1)
        yield Case(name, config, "gpt", "sgd")
        yield Case(name, config, "gpt", "adamw")
        yield Case(name, config, "llama", "adamw")
        if tensor == 2 and size in (2, 4):
            yield Case(name, config, "packed", "sgd")
        if size > 1 and tensor <= 2:
            yield Case(name, config, "odd", "sgd")
    yield from EXTRAS.get(size, [])
    yield from MISTAKES.get(size, [])


LLAMA_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp4": {"dp_shard": 4},
    "replicate2_tp2": {"dp_replicate": 2, "tp_size": 2, **_TP},
    "fsdp2_tp2": {"dp_shard": 2, "tp_size": 2, **_TP},
    "fsdp2_tp2_sp": {"dp_shard": 2, "tp_size": 2, **_SP},
    "pp2_tp2": {"pp_size": 2, "tp_size": 2, **_TP, "pipeline": {"microbatches": 4}},
    "pp2_fsdp2": {"pp_size": 2, "dp_shard": 2, "pipeline": {"microbatches": 4}},
}
"""Layouts of 4 ranks for Transformers' models."""

LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}
"""Model -> what it has beside the sizes that all of them share."""

LLAMA_RUNS = (("llama", "sgd"), ("llama", "adamw"), ("llama_tied", "sgd"), ("qwen3", "adamw"))
"""Model and optimizer of each run under a layout."""
