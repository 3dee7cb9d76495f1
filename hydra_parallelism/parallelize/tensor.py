"""The tensor axis: a plan's styles put on modules over ``context.mesh["tp"]``.

What the plan does not name stays a plain tensor on every ``tp`` rank. That is right as long as the module meets whole
activations: the column-wise modules behind it sum the gradients of their inputs over ``tp``, so each rank computes the same
whole gradient. It would be wrong inside a zone (see :class:`.recipe.Recipe`), between a column-wise and a row-wise module,
where a rank sees its own heads only: there a module with parameters that the plan is silent about is refused.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from . import blocks, plans, sequence
from .recipe import Recipe
from .styles import STYLES, build, own

__all__ = ["choose_rules", "find_zones", "split_tensors"]

_log = logging.getLogger(__name__)

_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


def split_tensors(module: nn.Module, recipe: Recipe, context: ParallelContext) -> None:
    """Apply the tensor plan, and sequence parallelism with it, to a model or a stage in place.

    Collective: call on all ranks. Nothing is sent here: every rank cuts its slices out of the weights that it holds, which are
    the same on all ranks by then.

    Args:
        module: The whole model or one stage, its parameters plain.
        recipe: Which module gets which style.
        context: The context with the ``tp`` mesh.
    """
    held = _tied(module)
    styles: dict[str, Any] = {}
    for name, _ in recipe.present(tuple(recipe.rules), module):
        styles[name] = build(recipe.rules[name], *sequence.placements(name, recipe))
    mesh = context.mesh["tp"]
    for name, style in styles.items():
        split = module.get_submodule(name)
        parallelize_module(split, mesh, style, src_data_rank=None)
        if STYLES[recipe.rules[name]].splits != "out":
            split.register_forward_hook(lambda _module, _inputs, output: own(output))
    if recipe.config.enable_sequence_parallel:
        sequence.enclose(module, recipe, mesh)
    _tie_again(module, held)


def choose_rules(
    model: nn.Module, config: ParallelismConfig, tp: int, key: str, experts: Collection[str] = ()
) -> dict[str, str]:
    """Module name -> style, judged against the model. ``experts`` are modules that have a plan of their own. Pure.

    Raises:
        ConfigurationError: No plan at ``tp > 1``, a style that does not fit its module, or a dim that ``tp`` does not divide.
    """
    if not config.tp_plan and tp > 1:
        given = "null" if config.tp_plan is None else "{}"
        raise ConfigurationError(
            f"{key}.tp_size={tp}, but {key}.tp_plan={given}: {tp} ranks would compute the whole model each, {tp} times the "
            f"same\n  try: {key}.tp_plan=auto (the model's own plan), or a mapping of module patterns to styles"
        )
    rules = _complete_ties(model, plans.resolve(model, config, key, experts))
    for name, style in rules.items():
        _judge(model.get_submodule(name), name, style, tp, config, key)
    _judge_ties(model, rules, key)
    return rules


def find_zones(
    model: nn.Module,
    rules: Mapping[str, str],
    block_names: tuple[str, ...],
    tp: int,
    key: str,
    apart: Collection[str] = (),
) -> tuple[str, ...]:
    """The modules that hold split weights, inside which activations may be slices. Pure.

    ``apart`` are modules that the plan need not speak of: experts, and routers, which see whole activations.

    In a block these are its children that hold such modules, or the block itself when it holds them directly; elsewhere the
    parent of a module that returns or takes slices, the root apart.

    Raises:
        ConfigurationError: A module with parameters inside a zone that the plan is silent about, heads that do not divide, or
            slices that are not taken as such.
    """
    found: dict[str, bool] = {}
    for name, style in rules.items():
        zone, slices = _zone(name, block_names), bool(STYLES[style].splits)
        in_block = any(f"{zone}.".startswith(f"{block}.") for block in block_names)
        if zone and (slices or (in_block and STYLES[style].dim is not None)):
            found[zone] = found.get(zone, False) or slices
    at_root = {name: style for name, style in rules.items() if not _zone(name, block_names)}
    _judge_root(at_root, key)
    if any(STYLES[style].splits and style != "colwise_vocab" for style in at_root.values()):
        _judge_beside(model, at_root, rules, (*block_names, *found), key)
    for zone in (zone for zone, slices in found.items() if slices):
        inner = [name for name in rules if name.startswith(f"{zone}.")]
        for silent in (silent for silent in _silent(model, zone, rules) if silent not in apart):
            _refuse_silent(model.get_submodule(silent), silent, inner, key)
        _judge_heads(model.get_submodule(zone), zone, inner, tp, key)
        _judge_slices(model, zone, {name: rules[name] for name in inner}, key)
    return tuple(found)


def _judge_beside(
    model: nn.Module, at_root: Mapping[str, str], rules: Mapping[str, str], apart: tuple[str, ...], key: str
) -> None:
    """The same of the root, if it passes slices from module to module: blocks and zones stand apart from it."""
    for silent in _silent(model, "", rules):
        if not any(f"{silent}.".startswith(f"{other}.") for other in apart):
            _refuse_silent(model.get_submodule(silent), silent, list(at_root), key)
    _judge_stacked(model, at_root, key)


def _refuse_silent(module: nn.Module, name: str, inner: list[str], key: str) -> None:
    pattern = blocks.starred(name)
    if isinstance(module, nn.Linear):
        why = "a linear layer among split ones is split too, or its features do not fit theirs"
        remedy = f"{{{pattern}: colwise}} if it makes slices, {{{pattern}: rowwise}} if it takes them"
    else:
        why = "whether its gradients must be summed over tp depends on where it stands; say so with one more rule"
        remedy = (
            f"{{{pattern}: replicated_with_grad_allreduce}} if it sees its rank's heads or features only, "
            f"{{{pattern}: replicate}} if it sees all of them"
        )
    beside = f"{', '.join(inner)} beside it {'are' if len(inner) > 1 else 'is'} split"
    raise ConfigurationError(
        f"{key}.tp_plan: {name} has parameters and is not in the plan, while {beside}\n  {why}\n  try: {remedy}"
    )


def _zone(name: str, block_names: tuple[str, ...]) -> str:
    block = next((block for block in block_names if name.startswith(f"{block}.")), None)
    if block is None:
        return name.rpartition(".")[0]
    child = name[len(block) + 1 :].split(".")
    return f"{block}.{child[0]}" if len(child) > 1 else block


def _silent(model: nn.Module, zone: str, rules: Mapping[str, str]) -> Iterator[str]:
    for inner, module in model.get_submodule(zone).named_modules():
        name = f"{zone}.{inner}".strip(".")
        if name and name not in rules and next(module.parameters(recurse=False), None) is not None:
            yield name


def _judge(module: nn.Module, name: str, style: str, tp: int, config: ParallelismConfig, key: str) -> None:
    kind = STYLES[style]
    if not isinstance(module, kind.fits):
        options = ", ".join(other for other, its in STYLES.items() if isinstance(module, its.fits))
        wanted = " or ".join(fit.__name__ for fit in kind.fits)
        raise ConfigurationError(
            f"{key}.tp_plan: style {style} is for {wanted}, but {name} is {type(module).__name__}\n  try: one of {options}"
        )
    if style == "sequence_parallel" and not config.enable_sequence_parallel:
        raise ConfigurationError(
            f"{key}.tp_plan: {name} is to be sequence_parallel, but {key}.enable_sequence_parallel=false\n"
            f"  try: {key}.enable_sequence_parallel=true"
        )
    if kind.dim is None:
        return
    shape: tuple[int, ...] = tuple(module.get_parameter("weight").shape)
    size, left = divmod(shape[kind.dim], kind.pieces)
    if size % tp or left:
        halves = f" in {kind.pieces} equal pieces of {shape[kind.dim] / kind.pieces:g}" if kind.pieces > 1 else ""
        raise ConfigurationError(
            f"{key}.tp_size={tp} does not divide {name} ({style}): its weight {shape} has "
            f"{shape[kind.dim]} along dim {kind.dim}{halves}, {size} % {tp} = {size % tp}\n"
            f"  try: {key}.tp_size={_divisor_below(size, tp)}, or another size of the model"
        )


def _judge_root(rules: Mapping[str, str], key: str) -> None:
    """Outside all zones a slice is no better, but for the logits of a loss that knows."""
    ends = any(STYLES[style].splits == "in" for style in rules.values())
    for name, style in rules.items():
        if STYLES[style].splits == "out" and style != "colwise_vocab" and not ends:
            _refuse_slices(name, style, "the output of the model would be a slice", "colwise_gather_output", key)


def _judge_slices(model: nn.Module, zone: str, rules: Mapping[str, str], key: str) -> None:
    """What leaves a module as a slice must be taken as one, and what is mixed with slices must be one too.

    Where activations go is not known here. But a zone gives back whole activations, so it takes a module that makes slices and
    one that ends them; and modules that read equally wide inputs (queries, keys and values, gate and up) meet again soon.
    """
    sides = {side: [name for name, style in rules.items() if STYLES[style].splits == side] for side in ("out", "in")}
    if not sides["in"]:
        name = sides["out"][0]
        why = f"no module of {zone} takes slices, so what leaves it would be one"
        _refuse_slices(name, rules[name], why, "colwise_gather_output", key)
    if not sides["out"]:
        name = sides["in"][0]
        _refuse_slices(name, rules[name], f"it takes a slice, and no module of {zone} returns one", "rowwise_split_input", key)
    _judge_stacked(model, rules, key)
    widths = {_width(model, name): name for name in sides["out"]}
    for name, style in rules.items():
        beside = widths.get(_width(model, name))
        if beside and style in ("replicate", "colwise_gather_output") and isinstance(model.get_submodule(name), nn.Linear):
            why = f"it returns all features, while {beside} ({rules[beside]}) beside it, on an input as wide, returns a slice"
            _refuse_slices(name, style, why, rules[beside], key)


def _judge_stacked(model: nn.Module, rules: Mapping[str, str], key: str) -> None:
    """A layer that returns more than any layer beside it takes is several matrices, and ``colwise`` takes them for one."""
    takers = [(_width(model, name) or 0, STYLES[style]) for name, style in rules.items() if STYLES[style].splits == "in"]
    widths = [width // kind.pieces for width, kind in takers]
    for name, style in rules.items():
        features = getattr(model.get_submodule(name), "out_features", None)
        if widths and features and STYLES[style].splits == "out" and style != "colwise_vocab":
            _judge_pieces(name, style, features, widths, key)


def _judge_pieces(name: str, style: str, features: int, widths: list[int], key: str) -> None:
    pieces = STYLES[style].pieces
    if features // pieces > max(widths):
        remedy = (
            f"{{{blocks.starred(name)}: packed_colwise}}"
            if features == 2 * max(widths)
            else f"one layer for each matrix instead of {name}"
        )
        raise ConfigurationError(
            f"{key}.tp_plan: {name} is {style} and returns {features} features, but what takes slices beside it takes at most "
            f"{max(widths)}: is it several matrices in one?\n  try: {remedy}"
        )
    if pieces > 1 and features // pieces not in widths:
        raise ConfigurationError(
            f"{key}.tp_plan: {name} is {style}, but half of its {features} features is what nothing beside it takes\n"
            f"  try: {{{blocks.starred(name)}: colwise}}"
        )


def _width(model: nn.Module, name: str) -> int | None:
    return getattr(model.get_submodule(name), "in_features", None)


def _refuse_slices(name: str, style: str, why: str, instead: str, key: str) -> None:
    raise ConfigurationError(
        f"{key}.tp_plan: {name} is {style}, but {why}\n  try: {{{blocks.starred(name)}: {instead}}}, or {key}.tp_plan=auto"
    )


def _judge_heads(module: nn.Module, zone: str, rules: list[str], tp: int, key: str) -> None:
    """Every rank must get whole heads: half of one would be computed as if it were another."""
    attention = any(type(child) is nn.Linear and "q" in name.rpartition(".")[2] for name, child in module.named_modules())
    for attributes in (sequence.HEADS, _KEY_HEADS):
        for owner in (module, getattr(module, "config", None) if attention else None):
            found = next((a for a in attributes if isinstance(getattr(owner, a, None), int)), None)
            if found and getattr(owner, found) % tp:
                heads = getattr(owner, found)
                raise ConfigurationError(
                    f"{key}.tp_size={tp} does not divide the heads of {zone}: {found}={heads}, {heads} % {tp} = {heads % tp}\n"
                    f"  try: {key}.tp_size={_divisor_below(heads, tp)}, or another number of heads"
                )
            if found:
                break


def _divisor_below(size: int, tp: int) -> int:
    return next(n for n in range(min(size, tp), 0, -1) if size % n == 0)


def _tied(module: nn.Module) -> list[list[tuple[str, str]]]:
    """Groups of (module, attribute) that share one parameter."""
    places: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((path, name))
    return [group for group in places.values() if len(group) > 1]


def _tie_again(module: nn.Module, groups: list[list[tuple[str, str]]]) -> None:
    """Styles give each module a parameter of its own. Those that were one become one again: their slices are equal."""
    for (first, name), *others in groups:
        parameter = getattr(module.get_submodule(first), name)
        for path, other in others:
            setattr(module.get_submodule(path), other, parameter)


def _complete_ties(model: nn.Module, rules: dict[str, str]) -> dict[str, str]:
    """Give a module that shares its weight with one in the plan the style that splits it along the same dim.

    The styles chosen take whole activations and return whole ones, so that nothing around the module changes.
    """
    completed = dict(rules)
    for group in _tied(model):
        dims = {STYLES[rules[path]].dim for path, _ in group if path in rules}
        for path, _ in group:
            partner = _WHOLE.get((type(model.get_submodule(path)), next(iter(dims)))) if len(dims) == 1 else None
            if path not in rules and partner:
                _log.info("%s shares its weight with a module of the tensor plan, so it is %s", path, partner)
                completed[path] = partner
    return completed


_WHOLE: Mapping[tuple[type[nn.Module], int | None], str] = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Embedding, None): "replicate",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
    (nn.Linear, None): "replicate",
}


def _judge_ties(model: nn.Module, rules: Mapping[str, str], key: str) -> None:
    for group in _tied(model):
        dims = {path: STYLES[rules[path]].dim if path in rules else "unsplit" for path, _ in group}
        if len(set(dims.values())) > 1:
            said = ", ".join(f"{path}: {rules.get(path, 'not in the plan')}" for path in dims)
            raise ConfigurationError(
                f"{key}.tp_plan splits one shared parameter in different ways: {said}\n"
                f"  try: styles that split it along the same dim, e.g. embedding_rowwise and colwise_gather_output"
            )
