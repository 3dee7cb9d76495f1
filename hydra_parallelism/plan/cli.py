"""The console script ``hydra-parallelism``."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_TOP = 10
_PLAN = """\
say what a layout would be on a machine, without starting anything

  hydra-parallelism plan parallelism=hsdp world.nodes=16 world.per_node=8
  hydra-parallelism plan parallelism.tp_size=8 parallelism.dp_shard=-1 world=dgx_a100 world.nodes=4 --of 9
  hydra-parallelism plan --rank world.nodes=8 model.hidden=4096 model.layers=32 ... model.batch=1024
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script.

    Args:
        arguments: Words of the command line; ``None`` takes the process's own.

    Returns:
        Exit status: 0, or 1 with a message on stderr when the config is refused.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    parsed, rest = _parser().parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or parsed.command == "doctor"]
    if unknown:
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    if parsed.command == "doctor":
        from ..doctor import cli as doctor

        return doctor.run(parsed)
    if arguments is None:
        gc.disable()  # a short life of its own: nearly all there is stays in use, and looking through it takes time
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        _plan(parsed, [*parsed.overrides, *rest])
    except (HydraException, OmegaConfBaseException) as error:
        sys.stderr.write(f"{_told(error)}\n{_hint(parsed, [*parsed.overrides, *rest])}")
        return 1
    return 0


def _hint(parsed: argparse.Namespace, overrides: list[str]) -> str:
    """Words pasted from an app's command line are about its own config, too."""
    own = ("parallelism", "world", "model", "hydra", "=")
    foreign = [word for word in overrides if word and not word.lstrip("+~").startswith(own)]
    if not foreign or parsed.config_name:
        return ""
    return f"  try: --config-dir conf --config-name config, if {foreign[0]} is about an app's own config\n"


def _told(error: BaseException) -> str:
    """The message of an error, and of a refusal inside an interpolation only that."""
    from ..errors import ConfigurationError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigurationError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    inner = error.__cause__
    return f"{error}\n{inner}" if inner is not None and str(inner) not in str(error) else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hydra-parallelism", description="Look at layouts of processes before they run.")
    # Given a name, it need not make a formatter to ask for one, which imports much.
    commands = parser.add_subparsers(dest="command", required=True, prog="hydra-parallelism")
    plan = commands.add_parser("plan", description=_PLAN, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan.add_argument("overrides", nargs="*", help="as on the command line of an app: parallelism..., world..., model...")
    plan.add_argument("--of", type=int, default=0, metavar="RANK", help="whose groups to list (default: %(default)s)")
    plan.add_argument("--config-dir", metavar="DIR", help="a folder with more configs, e.g. parallelism/mine.yaml")
    plan.add_argument("--config-name", metavar="NAME", help="the app's primary config in that folder, e.g. config")
    plan.add_argument(
        "--format",
        choices=("rich", "text", "json", "svg", "html"),
        help="default: by the suffix of --output, else rich on a terminal if it is installed, else text",
    )
    plan.add_argument("--output", metavar="FILE", help="write there: .svg, .html, .json or .txt")
    plan.add_argument(
        "--colour",
        metavar="AXIS",
        help="of pictures: the axis that cells are coloured by (default: the first of fsdp, dp, ... in use)",
    )
    plan.add_argument(
        "--by",
        choices=("group", "index"),
        help="of pictures: one colour for each group along it (default), or for each index in one",
    )
    plan.add_argument("--rank", action="store_true", help="all layouts of the machine for a model, fastest first, by estimate")
    plan.add_argument("--top", type=int, metavar="N", help="of --rank: how many to list (default: 10)")
    from ..doctor.cli import add_parser

    add_parser(commands)
    return parser


def _plan(parsed: argparse.Namespace, overrides: list[str]) -> None:
    from ..errors import ConfigurationError
    from .composition import compose, model_of, resolve_case
    from .output import PICTURES, deliver, format_of
    from .report import report

    kind = parsed.format if parsed.output is None else format_of(parsed.output, parsed.format)
    if kind not in PICTURES:
        _refuse_colours(parsed)
    if parsed.top is not None and (not parsed.rank or parsed.top < 1):
        raise ConfigurationError(f"--top {parsed.top} is the number of layouts that --rank lists\n  try: --rank --top 10")
    config = compose(overrides, parsed.config_dir, parsed.config_name)
    if parsed.rank:
        _rank(kind, parsed, config)
        return
    case, model = resolve_case(config), model_of(config)
    if kind == "svg":
        from .drawing import default_axis, draw

        deliver(
            draw(case, default_axis(case.topology) if parsed.colour is None else parsed.colour, parsed.by or "group"),
            parsed.output,
        )
        return
    facts = report(case, parsed.of, whole=kind == "json")
    if config.model.module is not None:
        facts["price"] = _price_module(case, config.model.module, parsed.of)
    elif model is not None:
        from .price import price

        facts["price"] = price(case, model, parsed.of)
    if kind == "html":
        from .drawing import default_axis
        from .page import show_page

        axis = default_axis(case.topology) if parsed.colour is None else parsed.colour
        deliver(show_page(case, facts, axis, parsed.by or "group", _typed(parsed, overrides)), parsed.output)
        return
    _print(facts, kind, parsed.output)


def _typed(parsed: argparse.Namespace, overrides: list[str]) -> str:
    """The words that describe the layout, as one can paste them."""
    import shlex

    names = {"--config-dir": parsed.config_dir, "--config-name": parsed.config_name}
    options = [word for name, value in names.items() if value is not None for word in (name, value)]
    return shlex.join(["hydra-parallelism", "plan", *options, *overrides])


def _refuse_colours(parsed: argparse.Namespace) -> None:
    from ..errors import ConfigurationError

    for name in ("colour", "by"):
        value = getattr(parsed, name)
        if value is not None:
            raise ConfigurationError(f"--{name} {value} is for pictures\n  try: --format svg --{name} {value}")


def _price_module(case: Any, path: str, rank: int) -> dict[str, Any]:
    from .module import build, of_module
    from .price import price

    share = of_module(build(path), case.topology, case.config)
    return {**price(case, share.params, rank, share.memory(case.config)), "held": share.rows(rank)}


def _rank(kind: str | None, parsed: argparse.Namespace, composed: Any) -> None:
    from ..errors import ConfigurationError
    from .composition import model_of
    from .output import PICTURES, deliver
    from .rank import as_data, need_work, rank_layouts, show

    if kind in PICTURES:
        raise ConfigurationError(f"--format {kind} is a picture of one layout\n  try: --format json with --rank")
    model = need_work(model_of(composed), "--rank")
    facts = as_data(rank_layouts(composed, model), model, parsed.top or _TOP)
    text = json.dumps(facts, indent=2) if kind == "json" else show(facts, 1e9 * composed.world.memory_gb)
    deliver(f"{text}\n", parsed.output)


def _print(facts: dict[str, Any], kind: str | None, output: str | None) -> None:
    from . import text
    from .output import deliver

    if kind == "json":
        deliver(f"{json.dumps(facts, indent=2)}\n", output)
    elif kind == "rich":
        text.print_rich(facts)
    elif kind == "text" or output is not None:
        deliver(f"{text.show(facts)}\n", output)
    else:
        text.write(facts)
