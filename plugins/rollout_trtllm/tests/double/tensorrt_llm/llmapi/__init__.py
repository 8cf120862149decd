"""``tensorrt_llm.llmapi`` of the double."""

from trtllm_double import surface

surface.offer(__name__, globals())

from tensorrt_llm.llmapi import llm_args, rlhf_utils  # noqa: E402, F401 - the real package imports them too
