"""One rollout engine that generates with one finished policy after another, without a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch

from rlplug.config import RunConfig
from rlplug.distributed.offload import Offload
from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.interfaces.weight_sync import Bucket
from rlplug.models.hf_files import read_config
from rlplug.plugin_manager import plugins
from rlplug.rollout.engine_driver import EngineDriver, RankAgreement, SyncedPolicy
from rlplug.setup.inputs import RunInputs, read_inputs
from rlplug_eval.policies import Policy, checkpoint_buckets, checkpoint_network, config_for, folder_buckets

_OF_FILES: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Entries of a model's configuration that say nothing about its tensors."""


def placement_of(accelerator: str) -> Placement:
    """Return the only rank, on the first GPU, or on the CPU where ``trainer.accelerator`` is ``cpu`` or there is none.

    Raises:
        ConfigError: Several processes were started, or a GPU is asked for and not there.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "an evaluation and a chat run in one process, and WORLD_SIZE says that there are more: start one, without "
            "torchrun. An engine with servers uses as many GPUs as its options say."
        )
    has_gpu = torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise ConfigError(f"trainer.accelerator is {accelerator}, and there is no GPU here: set it to cpu.")
    device = torch.device("cuda", 0) if has_gpu and accelerator in ("gpu", "cuda", "auto") else torch.device("cpu")
    return Placement(device, 0, 1)


class PolicyEngine:
    """The configured engine, which gets the weights of one policy after another.

    Policies of one architecture follow each other by a weight sync; for another one the engine starts again.

    Args:
        config: Options of the run: its engine, environment and limits.
        placement: The only rank, and its device.
        is_stopping: Returns whether it is told to stop; quick.
        agree_to_stop: Returns the same, and is asked between calls of the engine.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        is_stopping: Callable[[], bool],
        agree_to_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.placement = placement
        self._is_stopping, self._agree_to_stop = is_stopping, agree_to_stop
        self._driver: EngineDriver | None = None
        self._buckets: Callable[[], Iterator[Bucket]] = lambda: iter(())
        self._started: tuple[PolicySpec, dict[str, Any]] | None = None
        self.version = 0
        """Number of the policy that generates, from 1."""

    @property
    def driver(self) -> EngineDriver:
        assert self._driver is not None, "use() starts the engine"
        return self._driver

    def read(self, policy: Policy) -> RunInputs:
        """Read a policy's files, without its weights, and check that the engine can run it.

        Raises:
            ConfigError: The files are unusable, or the engine cannot run the policy, or not here in one process.
        """
        engine = self.config.engine
        inputs = read_inputs(config_for(self.config, policy.model))
        engine.check(inputs.spec)
        if engine.ranks_per_engine > 1:
            raise ConfigError(
                f"{type(engine).__name__} runs on {engine.ranks_per_engine} ranks of the trainer, and there is one "
                "here: set rollout.tensor_parallel_size to 1, or take an engine with servers of its own."
            )
        engine.prepare(inputs.spec, self.placement)
        return inputs

    def use(self, policy: Policy, inputs: RunInputs, of_checkpoint: RunConfig | None = None) -> None:
        """Let the engine generate with ``policy`` from now on.

        Args:
            policy: The policy.
            inputs: What :meth:`read` returned for it.
            of_checkpoint: Options of the run that wrote the policy's checkpoint, where it is one.
        """
        spec, device, max_bytes = inputs.spec, self.placement.device, self.config.weight_sync.bucket_mib << 20
        if policy.checkpoint is None:
            self._buckets = partial(folder_buckets, policy.model, spec, max_bytes, device)
        else:
            assert of_checkpoint is not None
            network = checkpoint_network(of_checkpoint, policy.checkpoint)
            self._buckets = partial(checkpoint_buckets, of_checkpoint, network, spec, device)
        self.version += 1
        model_config = read_config(spec.path, "policy").to_dict()
        shape = {name: value for name, value in model_config.items() if name not in _OF_FILES}
        if self._driver is not None and not self._fits(spec, shape):
            self._restart_or_refuse(policy)
        if self._driver is None:
            self._started = (spec, shape)
            self._driver = self._start(spec)

    def _fits(self, spec: PolicySpec, shape: dict[str, Any]) -> bool:
        """Return whether the engine that runs takes a policy by a weight sync alone."""
        assert self._started is not None
        other, other_shape = self._started
        return shape == other_shape and spec == PolicySpec(**{**vars(other), "path": spec.path})

    def _restart_or_refuse(self, policy: Policy) -> None:
        engine = self.config.engine
        if not engine.capabilities.restart:
            raise ConfigError(
                f"{type(engine).__name__} cannot start twice in a process, and {policy.name} has another architecture "
                "or dtype than the policy before it: evaluate them with one command each."
            )
        self.driver.close()
        self._driver = None

    def _start(self, spec: PolicySpec) -> EngineDriver:
        return EngineDriver(
            engine=self.config.engine,
            policy=SyncedPolicy(spec, lambda: self._buckets(), plugins().hook),
            placement=self.placement,
            offload=Offload(),
            sleeps=False,
            max_restarts=self.config.limits.max_engine_restarts,
            agreement=RankAgreement(is_stopping=self._is_stopping, agree_to_stop=self._agree_to_stop),
        )

    def close(self) -> None:
        """Close the engine; safe to call twice."""
        if self._driver is not None:
            self._driver.close()
