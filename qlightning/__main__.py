"""``python -m qlightning``: the command line without its script."""

import sys

from qlightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
