"""Limits of a reward's requests."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug.errors import ConfigError


@dataclass(frozen=True)
class RequestLimits:
    """Concurrency, retries and deadlines of requests to a server.

    A request is tried again after a timeout, a connection that fails, and the statuses 408, 425, 429, 500, 502, 503,
    504 and 529. The wait before it is random, up to a bound that doubles each time, and at least what the server's
    ``Retry-After`` asks for. Any other failure is final.

    Args:
        max_concurrency: Requests of a rank at once.
        max_retries: Most retries of a request.
        request_deadline_s: Longest time for one request, in seconds.
        deadline_s: Longest time for a request with all its retries, in seconds; at most
            ``model.limits.reward_deadline_s``.
        first_backoff_s: Bound of the wait before the first retry, in seconds.
        max_backoff_s: Largest bound of a wait, in seconds.
    """

    max_concurrency: int = 32
    max_retries: int = 5
    request_deadline_s: float = 20.0
    deadline_s: float = 28.0
    first_backoff_s: float = 0.5
    max_backoff_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("request_deadline_s", "deadline_s", "first_backoff_s", "max_backoff_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(
                    f"limits.{name} of a reward is {getattr(self, name)}: give a positive number of seconds, up to a "
                    "day."
                )
        if self.max_concurrency < 1:
            raise ConfigError(f"limits.max_concurrency of a reward is {self.max_concurrency}: give at least 1.")
        if not 0 <= self.max_retries <= 100:
            raise ConfigError(f"limits.max_retries of a reward is {self.max_retries}: give 0 to 100.")
