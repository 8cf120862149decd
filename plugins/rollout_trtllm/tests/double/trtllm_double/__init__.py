"""A double of ``tensorrt_llm``: names from ``trtllm_contract.json``, a tiny model on the CPU.

Everything that the contract forbids raises. The real engine lets some of it pass silently; the docstrings say which.
"""
