"""The model that judges: its address, sampling, prices, limits and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlplug.errors import ConfigError
from rlplug.interfaces.plain_values import json_problem
from rlplug_rewards.requests.limits import RequestLimits

OWN_FIELDS: Final = frozenset({"model", "messages", "stream", "n", "response_format", "tools"})
"""Fields of a request that a judge sets itself, or whose answers it could not read."""


@dataclass(frozen=True)
class Prices:
    """Prices of an endpoint, in any currency.

    Args:
        prompt: Price of a million prompt tokens.
        completion: Price of a million completion tokens.
    """

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "completion"):
            if not 0 <= getattr(self, name) <= 1e9:
                raise ConfigError(
                    f"endpoint.prices.{name} is {getattr(self, name)}: give the price of a million tokens, 0 or more."
                )

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the price of one answer."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server: its route ``chat/completions``.

    Args:
        url: Address of the API, such as ``http://127.0.0.1:8000/v1``.
        model: Name of the model there.
        api_key_env: Name of the environment variable that has the key; ``null`` for a server without one.
        plain_http: Whether another host may get the key by ``http``.
        system: System message of every request.
        sampling: Fields that are sent with every request.
        limits: Concurrency, retries and deadlines.
        prices: Prices, for the count ``cost``.
        cache: File on a local disk that keeps answers, which ranks and runs may share.
        cache_mib: Largest size of that file in MiB.
        use_proxy: Ask through the proxy of ``https_proxy`` or ``http_proxy``, as ``no_proxy`` allows.
    """

    url: str
    model: str
    api_key_env: str | None = None
    plain_http: bool = False
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    limits: RequestLimits = field(default_factory=RequestLimits)
    prices: Prices = field(default_factory=Prices)
    cache: str | None = None
    cache_mib: int = 256
    use_proxy: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("endpoint.model of a judge is empty: name the model that the server has.")
        if taken := sorted(OWN_FIELDS & set(self.sampling)):
            raise ConfigError(f"endpoint.sampling of a judge has {taken[0]!r}, which a judge sets itself: remove it.")
        if problem := json_problem(dict(self.sampling)):
            raise ConfigError(f"endpoint.sampling of a judge has {problem}: give values of JSON.")
