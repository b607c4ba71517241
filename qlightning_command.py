"""The script ``qlightning``: apart from the package, which takes seconds to import, in which a user may interrupt."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line, and returns the exit status."""
    try:
        from qlightning.cli import main as run
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("qlightning: interrupted.\n")
        return 130
    return run()
