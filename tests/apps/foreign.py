"""What the engines of other libraries are told to do, by world size. Plain data: the tests read it, the worlds do it."""

from typing import Any

AUTO = {"tp_plan": "auto", "ep_plan": "auto"}

NATIVE: dict[int, tuple[tuple[str, dict[str, Any]], ...]] = {
    2: (
        ("llama", {"tp_size": 2, **AUTO}),
        ("llama", {"dp_shard": 2}),
        ("llama", {"pp_size": 2, "inference": True}),
        ("mixtral", {"dp_shard": 2, "ep_size": 2, **AUTO}),
    ),
    4: (("mixtral", {"dp_shard": 2, "tp_size": 2, "ep_size": 4, **AUTO}),),
}
"""World size -> models and layouts for Transformers' own parallelism."""
