"""Which errors mean that memory of this process ran out, by the texts of the libraries that raise them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlplug.cli.messages import explain_failure
from rlplug.errors import RunError
from rlplug.interfaces.memory_plan import out_of_memory

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'"
)
ERRORS = [
    torch.OutOfMemoryError("any text"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    dist.DistBackendError(NCCL),
    *(
        RuntimeError(f"CUDA error: {name} when calling `x`")
        for name in ("CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:30])
def test_each_library_s_words_are_known(error: RuntimeError) -> None:
    assert out_of_memory(error) is error
    outer = ValueError("something failed")
    outer.__cause__ = error
    assert out_of_memory(outer) is error
    text, has_traceback = explain_failure(outer)
    assert text.startswith("out of memory, allocated in ")
    assert not has_traceback


@pytest.mark.parametrize(
    "error",
    [
        RunError("the server answered: CUDA out of memory. Tried to allocate 2.00 GiB"),  # of another process
        RuntimeError("the reward model's host is out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("CUDA out of memory"),
        dist.DistBackendError("Connection closed by peer"),
    ],
)
def test_other_errors_keep_their_owner_and_traceback(error: Exception) -> None:
    assert out_of_memory(error) is None
    text, has_traceback = explain_failure(error)
    assert text.endswith("Its traceback:")
    assert has_traceback
