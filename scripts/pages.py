"""Writes the figures into the recipes' pages: ``python scripts/pages.py``.

``python scripts/pages.py cifar10 outputs/2026-12-01 multirun/2026-12-01`` first keeps the runs of these folders in
``recipes/results/cifar10.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ stands beside scripts/ and is not installed

from recipes import pages


def main() -> None:
    """Keeps runs where folders are given, and renders all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the file in recipes/results, without .json")
    parser.add_argument("folders", nargs="*", type=Path, help="of finished runs or sweeps of scripts/train.py")
    arguments = parser.parse_args()
    if arguments.name:
        print(pages.keep(arguments.name, arguments.folders))
    for path in sorted(Path(pages.__file__).parent.glob("*.md")):
        path.write_text(pages.rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
