"""``tensorrt_llm._torch`` of the double."""
