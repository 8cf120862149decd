"""One rank: ``python -m rlplug_devkit.optimizations JOB``, with the environment variables that torchrun sets."""

import pickle
import sys
from pathlib import Path

import torch

from rlplug_devkit.optimizations.ranks import run_variants

if __name__ == "__main__":
    torch.set_num_threads(1)  # ranks share the host, and the models are tiny
    run_variants(pickle.loads(Path(sys.argv[1]).read_bytes()))
