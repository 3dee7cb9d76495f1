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
    optimizers: tuple[str, ...] = ("adamw",)
    """Trained with one after the other, from the same weights."""
    trick: str = ""
    """What is done differently: ``seeds``, ``meta``, ``vocabulary``, or a mistake that must be noticed."""


_TP = {"tp_plan": "auto"}
_SP = {**_TP, "enable_sequence_parallel": True}
_EP = {"ep_plan": "auto"}
_SHARED = {f"layers.*.mlp.shared.{name}_proj": "sequence_parallel" for name in ("gate", "up", "down")}
_SUMMED = {"ep_plan": {"layers.*.mlp.experts": "moe_tp_experts"}}

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
        "hsdp2x2_tp2": {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2, **_TP},
    },
}
"""World size -> layout -> config."""

_RING2, _RING4, _ULYSSES2, _ULYSSES4, _USP = (
    {"context_parallel": {"ring_degree": ring, "ulysses_degree": ulysses}}
    for ring, ulysses in ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))
)
_SP2 = {"tp_size": 2, **_SP}

CONTEXT: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ring2": _RING2,
        "ring2_in_order": {"context_parallel": {"ring_degree": 2, "load_balance": False}},
        "ring2_recompute": {**_RING2, "activation_checkpointing": "full"},
        "ulysses2": _ULYSSES2,
        "ulysses2_recompute": {**_ULYSSES2, "activation_checkpointing": 2},
    },
    4: {
        "ring4": _RING4,
        "ulysses4": _ULYSSES4,
        "usp2x2": _USP,
        "fsdp2_ring2": {"dp_shard": 2, **_RING2},
        "fsdp2_ulysses2": {"dp_shard": 2, **_ULYSSES2},
        "replicate2_ring2": {"dp_replicate": 2, **_RING2},
        "ring2_tp2": {"tp_size": 2, **_TP, **_RING2},
        "ring2_tp2_sp": {**_SP2, **_RING2, "activation_checkpointing": "full"},
        "ulysses2_tp2_sp": {**_SP2, **_ULYSSES2},
        "pp2_ring2": {"pp_size": 2, **_RING2},
        "pp2_ulysses2": {"pp_size": 2, **_ULYSSES2, "activation_checkpointing": "full"},
    },
    8: {
        "fsdp2_ring4": {"dp_shard": 2, **_RING4},
        "fsdp2_ulysses4": {"dp_shard": 2, **_ULYSSES4},
        "fsdp2_usp2x2": {"dp_shard": 2, **_USP},
        "hsdp2x2_ring2": {"dp_replicate": 2, "dp_shard": 2, **_RING2},
        "hsdp2x2_ulysses2": {"dp_replicate": 2, "dp_shard": 2, **_ULYSSES2},
        "ring4_tp2_sp": {**_SP2, **_RING4},
        "ulysses4_tp2_sp": {**_SP2, **_ULYSSES4},
        "usp2x2_tp2_sp": {**_SP2, **_USP},
        "pp2_ring4": {"pp_size": 2, **_RING4},
        "pp2_ulysses4": {"pp_size": 2, **_ULYSSES4},
        "pp2_usp2x2": {"pp_size": 2, **_USP},
        "pp2_fsdp2_ulysses2": {"pp_size": 2, "dp_shard": 2, **_ULYSSES2},
    },
}
"""The same with the sequence cut over ring, ulysses or both: AdamW on models for longer sequences."""

_GATHERED = {
    "tp_plan": {"layers.*.attention.[qkv]_proj": "colwise_rep", "layers.*.attention.o_proj": "rowwise_rep"},
    "tp_size": 2,
}
"""Every output whole again, as in Transformers' plan for Phi-3."""

_VOCABULARY = {"tp_plan": {"head": "colwise_vocab"}}

EXTRAS: dict[int, list[Case]] = {
    1: [
        Case("one_ep", _EP, "moe"),
        Case("one_recompute", {"activation_checkpointing": "full"}),
    ],
    2: [
        Case("ep2", {"dp_shard": 2, "ep_size": 2, **_EP}, "moe", ("sgd", "adamw")),
        Case("ring2_ep2", {**_RING2, "ep_size": 2, **_EP}, "moe"),
        Case("ep2_skewed", {"dp_shard": 2, "ep_size": 2, **_EP}, "skewed"),
        Case("ep2_skewed_recompute", {"dp_shard": 2, "ep_size": 2, **_EP, "activation_checkpointing": "full"}, "skewed"),
        Case("tp2_ep2_skewed", {"tp_size": 2, "ep_size": 2, **_TP, **_SUMMED}, "skewed"),
        Case("ep2_recompute", {"dp_shard": 2, "ep_size": 2, **_EP, "activation_checkpointing": "full"}, "moe"),
        Case("ep2_offload", {"dp_shard": 2, "ep_size": 2, **_EP, "fsdp": {"cpu_offload": True}}, "moe"),
        Case("ep2_meta", {"dp_shard": 2, "ep_size": 2, **_EP}, "moe", trick="meta"),
        Case("tp2_ep2", {"tp_size": 2, "ep_size": 2, **_TP, **_SUMMED}, "moe"),
        Case("tp2_ep2_sp", {"tp_size": 2, "ep_size": 2, **_SP, **_EP}, "moe"),
        Case("tp2_ep2_shared", {"tp_size": 2, "ep_size": 2, **_TP, **_SUMMED}, "shared"),
        Case("tp2_ep2_sp_shared", {"tp_size": 2, "ep_size": 2, **_SP, **_EP, "tp_plan": _SHARED}, "shared"),
        Case("tp2_moe", {"tp_size": 2, **_TP, **_EP}, "moe"),
        Case("tp2_moe_sp", {"tp_size": 2, **_SP, **_EP}, "moe"),
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
        Case("ep4", {"dp_shard": 4, "ep_size": 4, **_EP}, "moe"),
        Case("ep2_efsdp2", {"dp_shard": 4, "ep_size": 2, **_EP}, "moe", ("sgd", "adamw")),
        Case("ep2_efsdp2_skewed", {"dp_shard": 4, "ep_size": 2, **_EP}, "skewed"),
        Case("hsdp2x2_ep2", {"dp_replicate": 2, "dp_shard": 2, "ep_size": 2, **_EP}, "moe", ("sgd", "adamw")),
        Case("fsdp2_tp2_sp_ep4", {"dp_shard": 2, "tp_size": 2, "ep_size": 4, **_SP, **_EP}, "moe"),
        Case("fsdp2_tp2_sp_ep2", {"dp_shard": 2, "tp_size": 2, "ep_size": 2, **_SP, **_EP}, "moe"),
        Case("ulysses2_tp2_sp_ep4", {**_SP2, **_ULYSSES2, "ep_size": 4, **_EP}, "moe"),
        Case("fsdp2_tp2_ep2", {"dp_shard": 2, "tp_size": 2, "ep_size": 2, **_TP, **_SUMMED}, "moe"),
        Case("fsdp2_tp2_sp_recompute", {"dp_shard": 2, "tp_size": 2, **_SP, "activation_checkpointing": 2}, "llama"),
        Case("fsdp2_tp2_sp_meta", {"dp_shard": 2, "tp_size": 2, **_SP}, "llama", trick="meta"),
        Case("replicate2_tp2_offload", {"dp_replicate": 2, "tp_size": 2, **_TP, "fsdp": {"cpu_offload": True}}),
    ],
}

EXTRAS[8] = [
    Case("ep8", {"dp_shard": 8, "ep_size": 8, **_EP}, "moe"),
    Case("ep4_efsdp2", {"dp_shard": 8, "ep_size": 4, **_EP}, "moe"),
    Case("hsdp2x2_tp2_sp_ep2", {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2, "ep_size": 2, **_SP, **_EP}, "moe"),
    Case("hsdp2x2_ring2_ep4", {"dp_replicate": 2, "dp_shard": 2, **_RING2, "ep_size": 4, **_EP}, "moe"),
    Case("pp2_ring2_tp2_sp_ep4", {"pp_size": 2, **_SP2, **_RING2, "ep_size": 4, **_EP}, "moe"),
    Case("ep2_efsdp4", {"dp_shard": 8, "ep_size": 2, **_EP}, "few"),
]

MISTAKES: dict[int, list[Case]] = {
    2: [
        Case("nobody_reduces", {}, trick="unreduced"),
        Case("experts_not_averaged", {"dp_shard": 2, "ep_size": 2, **_EP}, "moe", trick="summed"),
        Case("heads_not_summed", {"tp_size": 2, "tp_plan": {"layers.*.self_attn.[qk]_norm": "replicate"}}, "llama"),
    ],
}
"""Wrong on purpose: the comparison must say so."""


AS_USERS = {"fsdp3", "hsdp2x2", "fsdp2_tp2_sp", "ep2_efsdp2", "usp2x2", "hsdp2x2_tp2"}
"""Layouts of more than two ranks whose parameters are stepped by torch's optimizers themselves, see steps.py."""

OBSERVED = (1, 2, 4)
"""World sizes of observe.py."""

_ALSO: dict[str, set[str]] = {
    "llama": {"one_sp", "fsdp2", "tp2", "tp2_sp", "tp3_sp", "fsdp4", "tp4_sp", "fsdp2_tp2", "fsdp2_tp2_sp"},
    "packed": {"tp2", "tp2_sp", "fsdp2_tp2_sp"},
    "odd": {"fsdp2", "tp2", "fsdp3", "fsdp4", "hsdp2x2", "fsdp2_tp2_sp", "replicate2_tp2"},
}
"""Other models than the GPT, and the layouts that they have something to add to."""


def cases(size: int) -> Iterator[Case]:
    """Every case of a world size, those of one layout together: the GPT with both optimizers everywhere."""
    for name, config in LAYOUTS[size].items():
        yield Case(name, config, "gpt", ("sgd", "adamw"))
        for model, layouts in _ALSO.items():
            if name in layouts:
                yield Case(name, config, model)
    for name, config in CONTEXT.get(size, {}).items():
        if name != "ulysses4_tp2_sp":  # 12 heads over tp 2 are 6, which do not divide by 4
            yield Case(name, config, "gpt_long")
        if name in ("ring2", "ulysses2", "usp2x2", "ring2_tp2_sp", "ulysses4_tp2_sp"):
            yield Case(name, config, "llama_long")
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

PIECE_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2_ring2": {"dp_shard": 2, **_RING2},
    "usp2x2": {**_USP, "activation_checkpointing": "full"},
    "ulysses2_tp2_sp": {**_SP2, **_ULYSSES2},
    "pp2_ring2": {"pp_size": 2, **_RING2, "pipeline": {"microbatches": 4}},
}
"""The same with the sequence cut."""

MIXTURE_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2_efsdp2": {"dp_shard": 4, "ep_size": 2, **_EP},
    "fsdp2_tp2_ep2": {"dp_shard": 2, "tp_size": 2, "ep_size": 2, **_TP, **_SUMMED},
    "fsdp2_tp2_sp_ep4": {"dp_shard": 2, "tp_size": 2, "ep_size": 4, **_SP, **_EP},
    "pp2_ep2": {"pp_size": 2, "dp_shard": 2, "ep_size": 2, **_EP, "pipeline": {"microbatches": 4}},
}
"""The same for Transformers' mixtures of experts."""

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "mixtral": {"model_type": "mixtral", **_EXPERTS},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 8, "moe_intermediate_size": 24, **_EXPERTS},
}
"""Model -> what it has beside the sizes that all of them share."""

LLAMA_RUNS = (("llama", "sgd"), ("llama", "adamw"), ("llama_tied", "sgd"), ("qwen3", "adamw"))
MIXTURE_RUNS = (("mixtral", "adamw"), ("qwen3_moe", "sgd"))
"""Model and optimizer of each run under a layout."""


PIECE_RUNS = (("llama_tied", "adamw"), ("qwen3", "sgd"))
"""The same with the sequence cut."""


def llama_runs() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Layout, config, model and optimizer of every run, those of one layout together."""
    groups = ((LLAMA_LAYOUTS, LLAMA_RUNS), (PIECE_LAYOUTS, PIECE_RUNS), (MIXTURE_LAYOUTS, MIXTURE_RUNS))
    for layouts, runs in groups:
        for layout, config in layouts.items():
            yield from ((layout, config, model, optimizer) for model, optimizer in runs)
