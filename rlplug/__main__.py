"""``python -m rlplug`` is the console script ``rlplug``."""

import sys

from rlplug.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
