"""GPUs that Ray gives to an engine's workers: the trainer's own, or free ones of a cluster."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import ConfigError, RLPlugError, RunError
from rlplug_rollout_trtllm.environment import engine_environment, require_ray

NAMESPACE: Final = "rlplug"
"""Of the actors' names in a cluster."""


@dataclass(frozen=True)
class Bundles:
    """A placement group, of which each bundle has one GPU, and the bundles that an engine's workers take."""

    group: Any
    indices: list[int]

    @classmethod
    def reserve(cls, ray: Any, size: int, spans_hosts: bool, deadline_s: float) -> Bundles:
        """Reserve GPUs for the workers of one engine: on one host, or on as few as possible."""
        from ray.util.placement_group import placement_group

        strategy = "PACK" if spans_hosts else "STRICT_PACK"
        bundles = cls(placement_group([{"GPU": 1, "CPU": 1}] * size, strategy=strategy), [*range(size)])
        if not bundles.group.wait(timeout_seconds=deadline_s):
            bundles.remove()
            where = "" if spans_hosts else "on one host "
            raise RunError(
                f"Ray had no {size} free GPUs {where}for an engine within {deadline_s:g} s: it has "
                f"{ray.cluster_resources().get('GPU', 0):g}, of which {ray.available_resources().get('GPU', 0):g} are "
                "free. Add hosts, or lower rollout.num_engines or tensor_parallel_size."
            )
        return bundles

    def remove(self) -> None:
        """Give the GPUs back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    def first_node(self) -> str:
        """Return the id of the node of an engine's first worker: the engine talks to it over a socket of that host."""
        from ray.util import placement_group_table

        return str(placement_group_table(self.group)["bundles_to_node_id"][0])


class PrivateRay:
    """A Ray of this process alone, whose only GPUs are those of one engine.

    So no other decides which worker gets which GPU. The trainer's processes are none of Ray's. ``devices`` is
    ``CUDA_VISIBLE_DEVICES`` of the engine's processes, and ``size`` how many workers it has.
    """

    def __init__(self, devices: str, size: int, deadline_s: float) -> None:
        self._ray = require_ray()
        if self._ray.is_initialized():
            raise ConfigError(
                "the trainer's process belongs to a Ray cluster already, and TRTLLMRollout starts a Ray of its own for "
                "the GPUs that it shares: start the trainer outside of Ray, or take TRTLLMRayRollout."
            )
        sizes = {"num_gpus": size, "num_cpus": 2 * size}
        try:
            with engine_environment(devices):
                self._ray.init("local", include_dashboard=False, namespace=f"rlplug-{uuid.uuid4().hex}", **sizes)
            self.bundles = Bundles.reserve(self._ray, size, spans_hosts=False, deadline_s=deadline_s)
        except Exception as problem:
            self.close()
            if isinstance(problem, RLPlugError):
                raise
            raise RunError(f"Ray did not start on GPUs {devices}: {type(problem).__name__}: {problem}") from problem

    def close(self) -> None:
        """End Ray and all of its processes; safe to call twice."""
        if self._ray.is_initialized():
            self._ray.shutdown()


def attach(address: str) -> tuple[Any, bool]:
    """Connect this process to a cluster that runs; return Ray, and whether it was not connected before."""
    ray = require_ray()
    has_attached = not ray.is_initialized()
    try:
        if has_attached:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False)
    except ConnectionError as problem:
        raise ConfigError(
            f"rollout.ray_address is {address!r}, and no Ray cluster answers there: {problem} Start one with ray "
            "start --head, and ray start --address on other hosts."
        ) from problem
    return ray, has_attached
