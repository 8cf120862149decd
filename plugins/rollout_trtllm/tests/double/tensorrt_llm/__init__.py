"""A double of TensorRT-LLM, for tests: the names that the contract lists, and nothing else."""

from trtllm_double import surface

__version__ = surface.VERSION
surface.offer(__name__, globals())

from tensorrt_llm import _torch, llmapi  # noqa: E402, F401 - the real package imports them too
