"""Makes helper modules of each plugin's tests importable, and keeps compiled code of tests out of the home folder."""

import os
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.glob("plugins/*/tests"))]

for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):  # they win over run.compile_cache
    folder = Path(tempfile.gettempdir()) / f"rlplug-tests-{os.getuid()}" / name.lower()
    os.environ.setdefault(name, str(folder))
