"""``tensorrt_llm.llmapi.llm_args`` of the double."""

from trtllm_double import surface

surface.offer(__name__, globals())
