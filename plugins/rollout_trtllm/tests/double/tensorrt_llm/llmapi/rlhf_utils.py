"""``tensorrt_llm.llmapi.rlhf_utils`` of the double."""

from trtllm_double import surface

surface.offer(__name__, globals())
