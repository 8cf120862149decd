"""The process that SGLang runs in; ``docs/rollout-engines.md`` says why it needs one of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlplug_engines.engine_host import EngineHost, run_host

IDLE_TIMEOUT_S: Final = 60.0
KEPT: Final = frozenset(
    {
        *("finish_reason", "output_token_logprobs", "weight_version"),
        *("prompt_tokens", "cached_tokens", "num_retractions"),
    }
)
"""What :class:`rlplug_rollout_sglang.sampling.Output` reads of what SGLang says about a completion."""

ALL_MEMORY: Final = ["kv_cache", "weights", "cuda_graph"]


def main() -> None:
    """Serve one engine of SGLang."""
    run_host(_make)


def _make(arguments: dict[str, Any]) -> tuple[EngineHost, dict[str, int]]:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**arguments)
    about = engine.get_server_info()
    max_num_seqs = about["internal_states"][0]["effective_max_running_requests_per_dp"]
    return SGLangHost(engine), {
        "kv_cache_tokens": about["max_total_num_tokens"],
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(about["chunked_prefill_size"] or 0, 0),
        "largest_graph": largest_graph(about),
    }


def largest_graph(info: Mapping[str, Any]) -> int:
    """Return the largest batch with a CUDA graph of an engine that runs, 0 without, from what it says of itself."""
    if info.get("disable_cuda_graph"):
        return 0
    sizes = info.get("cuda_graph_bs_decode") or info.get("cuda_graph_bs") or ()
    return max(sizes, default=info.get("cuda_graph_max_bs_decode") or info.get("cuda_graph_max_bs") or 0)


class SGLangHost(EngineHost):
    """Calls SGLang's ``Engine``."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.loop)
        self._engine = engine
        self._tokenizer: Any = engine.tokenizer_manager

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._engine.async_generate(
            input_ids=list(prompt_ids), sampling_params=dict(sampling), return_logprob=True, rid=request_id
        )
        about = {name: value for name, value in answer["meta_info"].items() if name in KEPT}
        return {"output_ids": answer["output_ids"], "meta_info": about}

    def abort(self, request_id: str) -> None:
        self._tokenizer.abort_request(rid=request_id)

    async def loads(self) -> list[tuple[int, int, float]]:
        """Return the scheduler's load, which SGLang keeps in shared memory."""
        loads = await self._tokenizer.get_loads()
        return [(load.num_running_reqs, load.num_waiting_reqs, load.token_usage) for load in loads]

    def shutdown(self) -> None:
        self._engine.shutdown()

    async def call_begin_update(self) -> None:
        """Get ready for new weights; older versions need no such call, and have none."""
        if hasattr(self._tokenizer, "begin_weight_update"):
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            _require(await self._tokenizer.begin_weight_update(BeginWeightUpdateReqInput()))

    async def call_update_weights(self, payloads: list[bytes], version: str) -> None:
        """Load a bucket, of which each tensor-parallel rank has a serialised handle in ``payloads``."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format="flattened_bucket", flush_cache=False, weight_version=version
        )
        _require(await self._tokenizer.update_weights_from_tensor(request))

    async def call_end_update(self) -> None:
        """Put new weights into the form that kernels read, and forget what was computed with the former ones."""
        if hasattr(self._tokenizer, "end_weight_update"):
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            _require(await self._tokenizer.end_weight_update(EndWeightUpdateReqInput()))
        await self._flush()

    async def call_release(self) -> None:
        """Give all memory back. A scheduler that is told so while it works fails; to flush is to wait for it."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._flush()
        await self._tokenizer.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=ALL_MEMORY))

    async def call_resume(self, tags: list[str]) -> None:
        """Take memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._tokenizer.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))

    async def _flush(self) -> None:
        answer = await self._tokenizer.flush_cache(timeout_s=IDLE_TIMEOUT_S)
        _require((answer.success, f"the cache was not flushed: {answer.message or 'requests still run'}"))


def _require(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RuntimeError(message)
