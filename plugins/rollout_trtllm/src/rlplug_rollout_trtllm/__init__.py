"""TensorRT-LLM as a rollout engine: beside the trainer on its GPUs, or on GPUs of a Ray cluster.

It was never run on TensorRT-LLM itself: a strict double, made from the contract of the 1.3 line, stands in for it in
the tests. ``python -m rlplug_rollout_trtllm.smoke`` is what to run first where the engine is installed.

Nothing is imported here, since the engine's own workers import an extension of this package, and not the trainer.
"""
