"""``AsyncLLM``: the contract's ``methods``, and the order that its ``order`` asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trtllm_double import model as models
from trtllm_double import wire
from trtllm_double.arguments import check_arguments, check_environment, check_prompt, check_sampling, max_tokens
from trtllm_double.contract import LLM as LLM_CONTRACT
from trtllm_double.contract import record
from trtllm_double.fp8 import FP8Layers
from trtllm_double.memory import KV_CACHE, WEIGHT_TAGS, ExecutorMemoryType, Memory
from trtllm_double.requests import GenerationResult
from trtllm_double.sampling import SamplingParams
from trtllm_double.weights import Weights
from trtllm_double.worker import Worker, worker_class

MODEL_WEIGHTS = ExecutorMemoryType("model_weights")


class LLM:
    """The base class. The double has no other engine than ``AsyncLLM``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the double has AsyncLLM only")


class AsyncLLM(LLM):
    """The engine: one loop, one task that draws tokens, a model on the CPU.

    Raises:
        TypeError: A positional argument, no model, or a configuration of another class.
        ValueError: An argument that the contract forbids or does not list.
        RuntimeError: An environment that the contract's ``environment`` excludes.
    """

    def __init__(
        self,
        *,
        placement_groups: Sequence[Any] | None = None,
        placement_bundle_indices: Sequence[Sequence[int]] | None = None,
        per_worker_gpu_share: float | None = None,
        **kwargs: Any,
    ) -> None:
        named = {
            "placement_groups": placement_groups,
            "placement_bundle_indices": placement_bundle_indices,
            "per_worker_gpu_share": per_worker_gpu_share,
        }
        assert list(named) == LLM_CONTRACT["named"]
        record("AsyncLLM", tuple(sorted({**kwargs, **{key: value for key, value in named.items() if value}})))
        self._is_shut_down = False
        self._loop: asyncio.AbstractEventLoop | None = None
        check_environment()
        self.args = check_arguments(kwargs)
        _check_placement(placement_groups, placement_bundle_indices, self.args.tensor_parallel_size)
        self._worker_class = worker_class(self.args.extension)
        self._memory = Memory(self.args.sleep_config)
        self._is_paused = False
        self._requests: list[GenerationResult] = []
        self._stepping: asyncio.Task[None] | None = None

    # ---- setup and end ----------------------------------------------------------------------------------------------

    async def setup_async(self) -> AsyncLLM:
        """Make the workers. A second call does nothing."""
        self._check_alive()
        if self._loop is not None:
            return self
        record("setup_async")
        arguments = self.args
        model = models.build(arguments)
        fp8 = FP8Layers(model, arguments.quantization_config, arguments.tensor_parallel_size)
        size = arguments.tensor_parallel_size
        self._weights = Weights(model, fp8, size, self._check_weights_free)
        self._vocabulary = model.config.vocab_size
        self.forward = models.Forward(model, arguments.kv_cache_config.enable_block_reuse)
        self._workers: list[Worker] = [
            self._worker_class(self, rank, size, model, self._weights) for rank in range(size)
        ]
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="trtllm_double worker")
        self._loop = asyncio.get_running_loop()
        return self

    def __await__(self) -> Generator[Any, None, AsyncLLM]:
        return self.setup_async().__await__()

    def shutdown(self) -> None:
        """End: requests that run fail, and every later call raises. A second call does nothing. From any thread."""
        if self._is_shut_down:
            return
        record("shutdown")
        self._is_shut_down = True
        if self._loop is None:
            return
        self._threads.shutdown(wait=False)
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        for request in self._requests:
            request.fail(RuntimeError("AsyncLLM was shut down"))
        self._requests.clear()

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("AsyncLLM was shut down")

    def _check_set_up(self) -> None:
        self._check_alive()
        if self._loop is None:
            raise RuntimeError("AsyncLLM is not set up: await setup_async()")
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("AsyncLLM is called in another event loop than setup_async was")

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate_async(self, inputs: Sequence[int] | str, sampling_params: Any = None) -> GenerationResult:
        """Begin a request: contract ``methods.generate_async``.

        Raises:
            RuntimeError: Paused, memory is released, or the weights are not complete and finalised.
            ValueError: The prompt or the sampling is one that the engine refuses.
        """
        self._check_set_up()
        self._check_can_generate()
        params = SamplingParams() if sampling_params is None else sampling_params
        prompt = check_prompt(inputs, self._vocabulary)
        record("generate_async", len(prompt))
        check_sampling(params)
        request = GenerationResult(prompt, params, max_tokens(self.args, len(prompt), params))
        self._requests.append(request)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._step_all())
        return request

    def _check_can_generate(self) -> None:
        if self._is_paused:
            raise RuntimeError("AsyncLLM is paused. Call resume_generation() before submitting new requests.")
        if self._memory.released:
            raise RuntimeError(f"generate_async: {sorted(self._memory.released)} are released")
        if self._weights.is_open:
            raise RuntimeError("generate_async: weights were updated and not finalised: update_weights(None)")
        if not self._weights.is_ready:
            raise RuntimeError("generate_async: the weights are not complete: update and finalise them")

    async def _step_all(self) -> None:
        """Draw tokens until no request is left: each of the first ``max_batch_size`` gets one, in turn."""
        while self._requests:
            aborted = [request for request in self._requests if request.aborted()]
            for request in [*aborted, *self._requests[: self.args.max_batch_size]]:
                if request.finished:
                    continue
                try:
                    request.step(self.forward)
                except Exception as error:  # noqa: BLE001 - belongs to the one who awaits the request
                    request.fail(error)
                await asyncio.sleep(0)
            self._requests = [request for request in self._requests if not request.finished]

    async def pause_generation(self) -> None:
        """Abort what runs, return when nothing does, and refuse requests until :meth:`resume_generation`.

        That it aborts is what ``tensorrt_llm/_torch/async_llm.py`` does; the contract is silent.
        """
        self._check_set_up()
        record("pause_generation")
        self._is_paused = True
        for request in self._requests:
            request.abort()
        await self._drain()

    async def resume_generation(self) -> None:
        """Take requests again."""
        self._check_set_up()
        record("resume_generation")
        self._is_paused = False

    async def _drain(self) -> None:
        if self._stepping is not None:
            await asyncio.wait([self._stepping])

    # ---- memory and weights -----------------------------------------------------------------------------------------

    async def release(self, tags: Sequence[Any]) -> None:
        """Release memory: contract ``methods.release``. While requests run it raises; the real engine waits."""
        self._check_set_up()
        record("release", tuple(map(str, tags)))
        await self._call_workers("sleep", (tags,), {}, self._workers)

    async def resume(self, tags: Sequence[Any]) -> None:
        """Take memory again: contract ``methods.resume``."""
        self._check_set_up()
        record("resume", tuple(map(str, tags)))
        await self._call_workers("wakeup", (tags,), {}, self._workers)

    def release_memory(self, tags: Sequence[Any]) -> None:
        """Do what ``sleep`` of the workers does."""
        self._check_no_requests("release")
        modes = self._memory.release(tags)
        if MODEL_WEIGHTS in modes:
            self._weights.lose(modes[MODEL_WEIGHTS])
        if KV_CACHE in modes:
            self.forward.reset_prefix_cache()

    def resume_memory(self, tags: Sequence[Any]) -> None:
        """Do what ``wakeup`` of the workers does."""
        self._memory.resume(tags)

    async def update_weights(self, weights: Mapping[str, str] | None) -> None:
        """Load a bucket on every worker, or finalise with ``None``: contract ``methods.update_weights``, ``wire``."""
        self._check_set_up()
        record("update_weights", wire.names_of(weights))
        await self._update_weights((weights,), {}, self._workers)

    async def _update_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any], workers: Sequence[Worker]) -> Any:
        """Wait for the requests that run, then load: the workers' method has ``control_action_decorator``."""
        await self._drain()
        if (*args, *kwargs.values()) != (None,):
            self._weights.begin()
        return await self._call_workers("update_weights", args, kwargs, workers)

    async def collective_rpc(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        target_ranks: int | list[int] | None = None,
    ) -> list[Any]:
        """Call a method of workers or their extension, and return what they do. Each runs in a thread of its own.

        ``unique_reply_rank`` and ``target_ranks`` say which workers are called, as in the sources' ``RayExecutor``.

        Raises:
            AttributeError: There is no such method.
        """
        self._check_set_up()
        record("collective_rpc", method)
        chosen = unique_reply_rank if target_ranks is None else target_ranks
        ranks = [chosen] if isinstance(chosen, int) else chosen
        workers = self._workers if ranks is None else [self._workers[rank] for rank in ranks]
        for worker in workers:
            if not callable(getattr(worker, method, None)):
                raise AttributeError(f"The RayGPUWorker has no method called {method!r}.")
        if method in ("sleep", "wakeup") and len(workers) < len(self._workers):
            raise RuntimeError(f"{method} of some workers: memory is released and resumed on all")
        if method == "update_weights":
            return await self._update_weights(args, kwargs or {}, workers)
        return await self._call_workers(method, args, kwargs or {}, workers)

    async def _call_workers(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], workers: Sequence[Worker]
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        replies = await asyncio.gather(
            *(loop.run_in_executor(self._threads, lambda w=w: getattr(w, method)(*args, **kwargs)) for w in workers),
            return_exceptions=True,
        )
        for reply in replies:
            if isinstance(reply, BaseException):
                self._weights.forget()
                raise reply
        self._weights.settle()
        return replies

    def _check_no_requests(self, what: str) -> None:
        if running := sum(not request.finished for request in self._requests):
            raise RuntimeError(f"{what}: {running} requests run")

    def _check_weights_free(self) -> None:
        self._check_no_requests("update_weights")
        if released := WEIGHT_TAGS & self._memory.released:
            raise RuntimeError(f"update_weights: {sorted(released)} are released: resume them first")


def _check_placement(groups: Sequence[Any] | None, indices: Sequence[Sequence[int]] | None, world_size: int) -> None:
    """Refuse placement groups without bundles for each worker."""
    if (groups is None) != (indices is None):
        raise ValueError("placement_groups and placement_bundle_indices must be given together")
    if groups is not None and indices is not None:
        if len(groups) != len(indices):
            raise ValueError(f"{len(groups)} placement_groups, and bundle indices for {len(indices)}")
        if sum(map(len, indices)) != world_size:
            raise ValueError(f"placement_bundle_indices {indices} are not one bundle for each of {world_size} workers")
