"""Experts as Transformers keeps them: all of a layer in one module, their weights stacked along dim 0.

What such a module must be, so that any class of the kind works unmodified: it holds parameters whose dim 0 is the number of
experts, and nothing else that is trained, and is called with ``(hidden, index, weights)``: tokens (T, D), and for each token
the numbers of its k experts and their weights, both (T, k). It returns the weighted sum of what those make of it, (T, D).
"""

import inspect

from torch import nn

__all__ = ["COUNTS", "count", "why_not"]

COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts")
"""Attributes in which such modules keep the number of their experts."""


def count(module: nn.Module) -> int:
    """Number of experts that a module holds: dim 0 of its parameters; 0 when it is none of these modules."""
    return 0 if why_not(module) else next(iter(module.parameters())).shape[0]


def why_not(module: nn.Module) -> str:
    """What a module lacks to be one of these; empty when it is."""
    own = dict(module.named_parameters(recurse=False))
    inner = next((name for name, child in module.named_children() if any(True for _ in child.parameters())), None)
    if inner is not None:
        return f"its parameters are in modules of their own ({inner}, ...), not stacked along dim 0"
    if not any(parameter.ndim >= 3 for parameter in own.values()):
        return "it holds no parameter with one matrix per expert, (experts, ., .)"
    sizes = {name: parameter.shape[0] if parameter.ndim > 1 else 0 for name, parameter in own.items()}
    declared = next((getattr(module, name) for name in COUNTS if isinstance(getattr(module, name, None), int)), None)
    experts = declared or max(sizes.values())
    other = next((name for name, size in sizes.items() if size != experts), None)
    if other is not None:
        return f"dim 0 of {other} {tuple(own[other].shape)} is not the number of its experts, {experts}"
    if len(inspect.signature(module.forward).parameters) != 3:
        return "its forward does not take (hidden, index, weights)"
    return ""
