"""``tensorrt_llm._torch.utils`` of the double."""

from trtllm_double import surface

surface.offer(__name__, globals())
