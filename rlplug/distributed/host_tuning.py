"""What the loop asks of its process: one host thread beside a GPU, and a garbage collector with little to walk."""

from __future__ import annotations

import gc

import torch


def limit_host_threads(device: torch.device) -> None:
    """Let torch's operations on the host run in one thread beside a GPU.

    Those that are left for the host are small, and take many times as long when threads must be woken for each: a sum
    over a step's tokens 16 ms on a machine of 32 cores. Lightning gives a single process all of them.
    """
    if device.type == "cuda":
        torch.set_num_threads(1)


def freeze_gc() -> None:
    """Take all objects that exist out of the garbage collector's sight: what a start and compilers leave stays anyway.

    A step makes many small objects, and each full collection would walk millions of others between two of them.
    """
    gc.collect()
    gc.freeze()
