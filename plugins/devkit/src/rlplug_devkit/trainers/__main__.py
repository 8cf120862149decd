"""One rank: ``python -m rlplug_devkit.trainers JOB``, with the environment variables that torchrun sets."""

import pickle
import sys
from pathlib import Path

import torch

from rlplug_devkit.trainers.ranks import run_cases

if __name__ == "__main__":
    torch.set_num_threads(1)  # ranks share the host, and the models are tiny
    run_cases(pickle.loads(Path(sys.argv[1]).read_bytes()))
