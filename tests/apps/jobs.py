"""What gradients and checkpoints are tried under, by world size. Imports no torch: the tests list it too."""

from typing import Any

NORMS: dict[int, dict[str, list[dict[str, Any]]]] = {
    4: {
        "ddp": [{"dp_replicate": 4}, {}],
        "hsdp": [{"dp_replicate": 2, "dp_shard": 2}, {}],
        "fsdp_tp": [{"dp_shard": 2, "tp_size": 2}, {}],
        "tp": [{"tp_size": 4}, {"shard": False}],
        "sp": [{"dp_shard": 2, "tp_size": 2}, {"sequence": True}],
        "pp_fsdp": [{"pp_size": 2, "dp_shard": 2}, {}],
        "pp": [{"pp_size": 4}, {"shard": False}],
    },
    8: {
        "pp_fsdp_tp": [{"pp_size": 2, "dp_shard": 2, "tp_size": 2}, {}],
        "made_up": [{"dp_replicate": 2, "dp_shard": 2, "tp_size": 2, "ep_size": 4}, {"made_up": True}],
    },
}
"""Name -> config, and options of the job by hand."""

GUIDED: dict[int, dict[str, dict[str, Any]]] = {
    2: {"cfg": {"cfg_parallel": 2, "inference": True}},
    4: {
        "fsdp": {"cfg_parallel": 2, "dp_shard": 2, "inference": True},
        "ddp": {"cfg_parallel": 2, "dp_replicate": 2, "inference": True},
        "pp": {"cfg_parallel": 2, "pp_size": 2, "inference": True, "pipeline": {"microbatches": 2}},
    },
}
"""Name -> config, for predictions of two branches."""

FUZZ = (2, 8)
"""Seed, and number of random layouts, for 4 ranks."""

FSDP4, HSDP, TP_FSDP = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp_size": 2, "tp_plan": "auto"}
PP_FSDP, PP_TP = {"pp_size": 2, "dp_shard": 2, "pipeline": {"microbatches": 2}}, {"pp_size": 2, "tp_size": 2}
INTERLEAVED = {**PP_FSDP, "pipeline": {"schedule": "Interleaved1F1B", "microbatches": 2}}
ALL_OF_THEM = {"pp_size": 2, "dp_shard": 2, "tp_size": 2, "tp_plan": "auto", "pipeline": {"microbatches": 2}}
OFFLOAD, KEPT = {"fsdp": {"cpu_offload": True}}, {"fsdp": {"reshard_after_forward": False}}
BY_HAND = {"shard": False}
EXPERTS, MIXTURE = {"ep_plan": "auto"}, {"experts": 8}
Job = tuple[str, str, Any, dict[str, Any]]

RESUME: dict[int, list[Job]] = {
    1: [
        ("save", "one", None, {}),
        ("save untouched", "new", None, {}),
        ("load", "one", None, {}),
        ("load", "one", {}, {}),
    ],
    4: [
        ("load", "one", FSDP4, {}),
        ("load", "new", TP_FSDP, {}),
        ("save", "fsdp4", FSDP4, {}),
        ("load", "fsdp4", TP_FSDP, {}),
        ("load", "fsdp4", HSDP, {}),
        ("load", "fsdp4", PP_FSDP, {}),
        ("load", "fsdp4", INTERLEAVED, {}),
        ("save", "interleaved", INTERLEAVED, {}),
        ("load", "interleaved", {**FSDP4, **OFFLOAD}, {}),
        ("save", "offload", {**TP_FSDP, **OFFLOAD}, {}),
        ("save", "kept", {**PP_FSDP, **KEPT}, {}),
        ("save", "pp_tp", PP_TP, BY_HAND),
        ("refused", "fsdp4", PP_FSDP, {"num_layers": 6, "hidden": 40}),
        ("refused", "new folder", FSDP4, {}),
        ("save", "experts", {"dp_shard": 4, "ep_size": 2, **EXPERTS}, MIXTURE),
        ("load", "experts", {"dp_replicate": 2, "dp_shard": 2, "ep_size": 2, **EXPERTS}, MIXTURE),
        ("load", "experts", {**INTERLEAVED, "ep_size": 2, **EXPERTS}, MIXTURE),
    ],
    2: [
        ("load", "offload", {"dp_shard": 2, **KEPT}, {}),
        ("load", "pp_tp", {"pp_size": 2}, BY_HAND),
        ("load", "experts", {"dp_shard": 2}, MIXTURE),
        ("save", "tp2", {"tp_size": 2, "tp_plan": "auto"}, {}),
        ("save", "kept2", {"dp_shard": 2, **KEPT}, {}),
        ("save untouched", "new2", {"pp_size": 2}, {}),
    ],
    8: [
        ("load", "tp2", ALL_OF_THEM, {}),
        ("load", "new2", {"dp_replicate": 2, "dp_shard": 4}, {}),
        ("load", "experts", {"dp_shard": 8, "ep_size": 8, **EXPERTS}, MIXTURE),
        ("load", "experts", None, MIXTURE),
        ("load", "fsdp4", None, {}),
        ("load", "interleaved", None, {}),
        ("load", "kept", None, {}),
        ("load", "kept2", None, {}),
        ("load", "pp_tp", None, {}),
        ("load", "tp2", None, {}),
        ("load", "new2", None, {}),
    ],
}  # fmt: skip
"""Jobs in the order in which they run: world size 1, then 4, 2, 8; later ones read what earlier ones wrote.

Each is an action, a folder, a config (``None``: rank 0 alone, without a process group) and options of the model."""
