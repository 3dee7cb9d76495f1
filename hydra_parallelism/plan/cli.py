"""The console script ``hydra-parallelism``."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

_PLAN = """\
say what a layout would be on a machine, without starting anything

  hydra-parallelism plan parallelism=hsdp world.nodes=16 world.per_node=8
  hydra-parallelism plan parallelism.tp_size=8 parallelism.dp_shard=-1 world=dgx_a100 world.nodes=4 --of 9
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script.

    Args:
        arguments: Words of the command line; ``None`` takes the process's own.

    Returns:
        Exit status: 0, or 1 with a message on stderr when the config is refused.
    """
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
        sys.stderr.write(f"{_told(error)}\n")
        return 1
    return 0


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
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", description=_PLAN, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan.add_argument("overrides", nargs="*", help="as on the command line of an app: parallelism..., world..., model...")
    plan.add_argument("--of", type=int, default=0, metavar="RANK", help="whose groups to list (default: %(default)s)")
    plan.add_argument("--config-dir", metavar="DIR", help="a folder with more configs, e.g. parallelism/mine.yaml")
    plan.add_argument(
        "--format", choices=("rich", "text", "json", "svg"), help="default: rich on a terminal if it is installed, else text"
    )
    plan.add_argument("--colour", metavar="AXIS", help="of --format svg: the axis that cells are coloured by (default: fsdp)")
    from ..doctor.cli import add_parser

    add_parser(commands)
    return parser


def _plan(parsed: argparse.Namespace, overrides: list[str]) -> None:
    from ..errors import ConfigurationError
    from .composition import compose, model_of, resolve_case
    from .drawing import draw
    from .price import price
    from .report import report

    if parsed.colour and parsed.format != "svg":
        raise ConfigurationError(f"--colour {parsed.colour} is for pictures\n  try: --format svg --colour {parsed.colour}")
    config = compose(overrides, parsed.config_dir)
    case, model = resolve_case(config), model_of(config)
    if parsed.format == "svg":
        sys.stdout.write(draw(case, parsed.colour or "fsdp"))
        return
    facts = report(case, parsed.of)
    if model is not None:
        facts["price"] = price(case, model, parsed.of)
    _print(facts, parsed.format)


def _print(facts: dict[str, Any], kind: str | None) -> None:
    from . import text

    if kind == "json":
        sys.stdout.write(f"{json.dumps(facts, indent=2)}\n")
    elif kind == "rich" or (kind is None and sys.stdout.isatty() and text.has_rich()):
        text.print_rich(facts)
    else:
        sys.stdout.write(f"{text.show(facts)}\n")
