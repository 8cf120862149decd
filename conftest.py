"""What all tests share: helper modules of plugins' tests, folders for compiled code, and how hypothesis draws."""

import os
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = ["model_fixtures", "batch_fixtures", "rollout_generators", "changed_tests"]

sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.glob("plugins/*/tests"))]

for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):  # they win over run.compile_cache
    folder = Path(tempfile.gettempdir()) / f"rlplug-tests-{os.getuid()}" / name.lower()
    os.environ.setdefault(name, str(folder))

# neither judges how fast a machine is; a push draws the same cases each time, a night new ones
shared = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("nightly", shared)
settings.register_profile("push", shared, derandomize=True)
settings.load_profile("push")
