"""``ServerBackend``: everything that the author of an engine with servers writes."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from rlplug.errors import brief
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.answer_checks import check_tokens
from rlplug.token_arrays import TokenFloats, TokenIds, as_tokens
from rlplug.types import Completion, Request, SamplingParams
from rlplug_engines.colocated.finish_reasons import as_finish_reason
from rlplug_engines.colocated.scheduler_advice import AdviceKeys
from rlplug_engines.servers.http_client import Server
from rlplug_engines.servers.process_group import Group, Rendezvous, SendGroup
from rlplug_engines.servers.processes import Launch, ServerSlot
from rlplug_engines.servers.weight_sender import TensorList


@dataclass(frozen=True)
class EngineLabels:
    """Names of one engine and of its options, for messages."""

    engine: str
    """Such as ``vLLM``."""
    colocated: str
    """The engine's class for the trainer's own GPUs."""
    server_key: str
    """What its servers call their key."""
    gpus_per_server: str = "tensor_parallel_size"
    """The options that say how many GPUs a server takes."""
    noise: tuple[str, ...] = ()
    """Beginnings of lines of a server's log that do not explain its end."""
    context_key: str = "max_model_len"
    """The option that sets the longest prompt and completion together."""
    keys: AdviceKeys = AdviceKeys()
    """Options that advice names, where those of the backend are no ``EngineOptions``."""
    api_processes: tuple[str, ...] = ()
    """What the command lines of a server's processes that answer requests have in them; empty measures none."""


@dataclass(frozen=True)
class BackendContext:
    """The run that a backend serves."""

    policy: PolicySpec
    device: torch.device
    """Holds the trainer's weights."""
    is_launched: bool
    """Whether this trainer starts the servers; otherwise they run already, at URLs."""
    data_parallel_size: int = 1
    """Copies of the model behind each server that is started."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server that runs."""

    max_model_len: int
    """Prompt and completion together, in tokens."""
    max_num_seqs: int
    """Requests that run at once, over all copies of the model."""
    kv_cache_tokens: int
    """Over all copies of the model."""
    num_workers: int
    """Processes that receive weights."""
    copies: int = 1
    """Copies of the model."""
    max_num_batched_tokens: int = 0
    """Most tokens of one forward pass; 0 where that is not known, or has no limit."""
    largest_graph: int = 0
    """Largest batch of a copy that has a CUDA graph; 0 where that is not known, or there are none."""


@dataclass(frozen=True)
class SchedulerState:
    """State of one server's scheduler, over all copies of its model; counters are those since it started."""

    running: int
    waiting: int
    kv_cache_use: float
    """The largest of its copies, as a share."""
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    """0 for a server that does not count them."""


@dataclass(eq=False)
class PendingRequest:
    """A request that a server works on, and what came back so far.

    Tokens come all at once, or, for a request that may be aborted, as they are generated: then an abort needs no answer
    from a server, which is late when its steps are short.
    """

    request: Request
    sampling: SamplingParams
    max_tokens: int
    """The longest completion that the request, the sampling and the engine's context allow."""
    version: int
    """The policy's, when it was sent."""
    is_streamed: bool
    vocab_size: int | None = None
    """The policy's, which token ids must stay below."""
    server: Server | None = None
    task: asyncio.Task[Any] | None = None
    limit: asyncio.Timeout | None = None
    """Ends it when its server answers nothing for too long."""
    is_aborted: bool = False
    token_ids: TokenIds | list[int] = field(default_factory=list)
    """A list while tokens come, and an array from :meth:`check` on."""
    logprobs: TokenFloats | list[float] = field(default_factory=list)
    finish_reason: str | None = None
    """Set by the last answer."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """For servers that ask for one. No two requests have the same, also when they have the same ``request_id``."""
    weight_version: str | None = None
    """Version of the weights that generated it, for servers that return it."""
    cached_prompt_tokens: int | None = None
    """Tokens of the prompt that came from the prefix cache, for servers that return it with each answer."""
    preemptions: int = 0
    """Number of times it lost its KV cache, for servers that return it with each answer."""

    @property
    def url(self) -> str:
        """Address of its server, for messages."""
        assert self.server is not None, "it was sent"
        return self.server.url

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add generated tokens; :meth:`check` looks at their values when all are there.

        Raises:
            EngineFault: Their logprobs are not as many, or there are more than were asked for.
        """
        if len(logprobs) != len(token_ids):
            raise EngineFault(f"{self.url} returned {len(logprobs)} logprobs for {len(token_ids)} tokens.")
        assert isinstance(self.token_ids, list), "all tokens were checked"
        assert isinstance(self.logprobs, list), "all tokens were checked"
        self.token_ids += token_ids
        self.logprobs += logprobs
        if len(self.token_ids) > self.max_tokens:
            raise EngineFault(
                f"{self.url} returned {len(self.token_ids)} token ids where at most {self.max_tokens} were asked for."
            )

    def check(self) -> None:
        """Check all tokens and logprobs, and make them arrays.

        Raises:
            EngineFault: No engine can have sampled them; the message names server, field and value.
        """
        tokens = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = check_tokens(self.url, *tokens, self.max_tokens, self.vocab_size)

    def field(self, answer: Any, path: str, *kinds: type | None) -> Any:
        """Return a field of a server's answer, such as ``meta_info.finish_reason``.

        Args:
            answer: The answer, or a part of it.
            path: Names of the field and of those around it, with dots between them.
            kinds: Types that it may have, ``None`` for JSON's null.

        Raises:
            EngineFault: The answer has no such field, or one of another type; the message names server and field.
        """
        value = answer
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                raise EngineFault(f"{self.url} sent an answer without the field {path!r}: {brief(answer, 200)}.")
            value = value[name]
        if not any(value is None if kind is None else type(value) is kind for kind in kinds):
            wanted = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
            raise EngineFault(f"{self.url} sent {brief(value)} as {path!r}, which must be {wanted}.")
        return value


class ServerBackend(ABC):
    """The commands, routes and payloads of one engine's servers. :class:`ServerEngine` drives it.

    An object is made on every trainer rank when the engine starts, before any server does: its constructor is the place
    for checks and imports of the engine's library. Coroutines run in the HTTP client's event loop, those of all servers
    at once.

    Args:
        options: The engine's options for servers that are started here.
        context: The run that it serves.
    """

    labels: ClassVar[EngineLabels]
    generate_route: ClassVar[str] = "generate"
    """Takes a POST of ``payload``; answers with JSON, or with server-sent events of JSON."""
    metrics_route: ClassVar[str] = "metrics"
    """Takes a GET; ``metrics`` reads the answer."""

    def __init__(self, options: Any, context: BackendContext) -> None:
        self.options = options
        self.context = context
        self.policy = context.policy
        self.device = context.device

    # ---- start ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self, slot: ServerSlot) -> Launch:
        """Return the command that starts a server. ``GET /health`` must answer 200 when the server is ready."""

    @abstractmethod
    async def settings(self, server: Server) -> ServerSettings:
        """Ask a server for its settings.

        Raises:
            ConfigError: It is of an unknown version, or was not started as training needs it.
            RunError: It refuses the key.
        """

    # ---- requests -------------------------------------------------------------------------------------------------

    @abstractmethod
    def payload(self, pending: PendingRequest) -> dict[str, Any]:
        """Return what to post for a request."""

    @abstractmethod
    def receive(self, pending: PendingRequest, answer: dict[str, Any]) -> None:
        """Add the tokens of an answer, or of one event of a stream, and set ``finish_reason`` with the last.

        :meth:`PendingRequest.field` reads the answer, which may be anything. Any other error here counts as one of the
        server too.

        Raises:
            RunError: The answer is not what was asked for.
        """

    def completion(self, pending: PendingRequest) -> Completion:
        """Return the completion of a request that has finished.

        Raises:
            RunError: It finished for a reason that training has no use for.
        """
        name = pending.request.request_id
        reason = as_finish_reason(self.labels.engine, name, pending.finish_reason)
        tokens, logprobs = as_tokens(pending.token_ids, np.int32), as_tokens(pending.logprobs, np.float32)
        return Completion(name, tokens, logprobs, reason, pending.version)

    async def abort(self, server: Server, pending: PendingRequest) -> None:  # noqa: B027 - overriding is optional
        """Stop a request whose connection was closed, for servers that do not notice that at once."""

    @abstractmethod
    def metrics(self, answer: Any) -> SchedulerState:
        """Return the scheduler's state from the answer of ``metrics_route``: parsed JSON, or text."""

    # ---- weights --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def join(self, server: Server, rendezvous: Rendezvous) -> None:
        """Have a server's workers join the process group, as rank ``rendezvous.rank_offset`` and the following ones."""

    def make_group(self, rendezvous: Rendezvous, timeout_s: float) -> Group:
        """Join the process group as its rank 0, while ``join`` runs."""
        return SendGroup.over_tcp(rendezvous, self.device, timeout_s)

    def join_remedy(self) -> str:
        """Return what to do about a server that cannot join, as a sentence."""
        return "A server of rollout.urls that another trainer used before may have to start anew."

    async def begin(self, server: Server) -> None:  # noqa: B027 - overriding is optional
        """Have a server expect weights; also one whose last trainer ended in the middle of a sync."""

    @abstractmethod
    async def receive_weights(self, server: Server, tensors: TensorList, version: int) -> None:
        """Have a server's workers receive the tensors of a bucket, one broadcast each, and load them."""

    @abstractmethod
    async def finish(self, server: Server) -> None:
        """Have a server use the weights that came, and drop its prefix cache."""

    async def leave(self, server: Server) -> None:  # noqa: B027 - most servers forget a group when its rank 0 is gone
        """Have a server that stays leave the process group."""
