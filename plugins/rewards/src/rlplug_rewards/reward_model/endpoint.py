"""Where a reward model is served: its address, name, kind of server and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlplug.errors import ConfigError
from rlplug_rewards.requests.limits import RequestLimits


@dataclass(frozen=True)
class RewardEndpoint:
    """A reward model behind a server of vLLM or SGLang.

    Args:
        url: Address of the server, such as ``http://127.0.0.1:8000``, without ``/v1``.
        model: Name of the model there.
        server: ``vllm`` for ``vllm serve MODEL --runner pooling``, ``sglang`` for ``python -m sglang.launch_server
            --model-path MODEL --is-embedding``. Token ids are sent to the route ``/classify`` of either.
        api_key_env: Name of the environment variable that has the key; ``null`` for a server without one.
        plain_http: Whether another host may get the key by ``http``.
        limits: Concurrency, retries and deadlines.
        use_proxy: Ask through the proxy of ``https_proxy`` or ``http_proxy``, as ``no_proxy`` allows.
    """

    url: str
    model: str
    server: Literal["vllm", "sglang"] = "vllm"
    api_key_env: str | None = None
    plain_http: bool = False
    limits: RequestLimits = field(default_factory=RequestLimits)
    use_proxy: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("endpoint.model of a reward model is empty: name the model that the server has.")
        if self.url.rstrip("/").endswith("/v1"):
            raise ConfigError("endpoint.url of a reward model ends with /v1: give the server's address without it.")
