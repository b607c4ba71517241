"""The command line: ``qlightning inspect | export | bench | compare | report``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from qlightning.cli import bench, compare, export, inspect, report
from qlightning.cli.output import say, write
from qlightning.errors import QuantizationError
from qlightning.version import __version__

_COMMANDS = (inspect, export, bench, compare, report)
_EPILOG = """\
examples:
  qlightning inspect net.pt2
  qlightning export last.ckpt net.onnx --model torchvision.models.resnet18 num_classes=10 --input 1,3,224,224
  qlightning bench net.pt2 --batch 1 16 --threads 1 2
  qlightning compare net.pt2 net.onnx
  qlightning report net.pt2 report.html

exit status: 0 done, 1 the command failed (the reason is on stderr), 2 it was called wrongly, 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Those after the name of the program; None: those of the process.

    Returns:
        The exit status.
    """
    try:
        options = _parser().parse_args(arguments)
        try:
            # Nets may print, and stdout is for the result; either may be closed.
            with (
                redirect_stderr(sys.stderr or StringIO()) as stderr,
                redirect_stdout(stderr),
                warnings.catch_warnings(),
            ):
                warnings.showwarning = _show_warning
                result = options.run(options)
            write(result)
        except Exception as error:
            if options.traceback:
                raise
            kind = "" if isinstance(error, (QuantizationError, ImportError, OSError)) else f"{type(error).__name__}: "
            say(f"qlightning {options.command}: {kind}{error}")
            return 1
    except KeyboardInterrupt:
        say("qlightning: interrupted.")
        return 130
    except SystemExit:  # of --help and --version, whose texts are still to be written
        write("")
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qlightning",
        description="Looks into files of int8 models, turns them into other kinds, times and compares them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"qlightning {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in _COMMANDS:
        added = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(added)
        added.add_argument("--json", action="store_true", help="print JSON in place of text")
        added.add_argument("--traceback", action="store_true", help="show where in the code an error comes from")
        added.set_defaults(run=command.run)
    return parser


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"qlightning: warning: {message}")
