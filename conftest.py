"""Makes helper modules of each plugin's tests importable, as ``pythonpath`` in pyproject.toml does for ``tests``."""

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.glob("plugins/*/tests"))]
