"""Faults in what an engine promises, and in what it does to the trainer's process."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy
import torch

from engine_faults.faults import Capable, Plain, fault
from rlplug.errors import ConfigError
from rlplug.interfaces import EngineCapabilities, Placement, PolicySpec
from rlplug.interfaces.memory import EngineMemory
from rlplug.types import Completion, Request, SamplingParams

CLAIMS, PROCESS = "claims, refusals and plans", "the trainer's process"
PLAN = "test_memory_plan_says_something"
STATE = "test_process_is_left_as_it_was"


@fault(CLAIMS, "test_policy_is_accepted")
class RefusesEveryPolicy(Plain):
    """Refuses each policy in ``check``."""

    def check(self, policy: PolicySpec) -> None:
        raise ConfigError(f"no {policy.path}")


@fault(CLAIMS, "test_policy_is_accepted")
class RefusesEveryMachine(Plain):
    """Refuses each machine in ``prepare``."""

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        raise ConfigError("a library is missing")


@fault(CLAIMS, "test_policy_is_accepted")
class IsSharedByNobody(Plain):
    """Says that no rank runs it."""

    @property
    def ranks_per_engine(self) -> int:
        return 0


@fault(CLAIMS, PLAN)
class PlansForSomeModels(Plain):
    """Returns no memory plan for a model with experts; an engine has a plan for all models, or for none."""

    def plan_memory(self, policy, needs):
        return None if "experts" in policy.path else super().plan_memory(policy, needs)


@fault(CLAIMS, PLAN)
class PlansZeros(Plain):
    """Plans no bytes."""

    def plan_memory(self, policy, needs):
        return EngineMemory(0, 0, 0, 0, 0)


@fault(CLAIMS, PLAN)
class PlansGigabytes(Plain):
    """Plans in GB where bytes are asked for."""

    def plan_memory(self, policy, needs):
        plan = super().plan_memory(policy, needs)
        return dataclasses.replace(plan, weights=plan.weights >> 30, kv_cache=plan.kv_cache >> 30)


@fault(CLAIMS, PLAN)
class PlansTheSameForAll(Plain):
    """Plans the same for every policy."""

    def plan_memory(self, policy, needs):
        return EngineMemory(1 << 30, 1 << 30, 0, 1 << 30, 1 << 10, keeps_cache=False)


@fault(CLAIMS, PLAN)
class PlansOneCompletion(Plain):
    """Plans the KV cache of one completion, and says that it generates many at once."""

    def plan_memory(self, policy, needs):
        return dataclasses.replace(
            super().plan_memory(policy, needs), kv_cache=needs.longest * needs.kv_bytes_per_token
        )


@fault(CLAIMS, PLAN)
class PlansAfterItsStart(Plain):
    """Plans with what only a start gives."""

    def plan_memory(self, policy, needs):
        assert self._model is not None
        return super().plan_memory(policy, needs)


@fault(CLAIMS, "test_logprobs_are_of_the_sampled_distribution")
class ClaimsLogprobs(Plain):
    """Claims logprobs and returns zeros."""

    def generate(self, requests, sampling):
        return [
            dataclasses.replace(c, logprobs=numpy.zeros(len(c.token_ids))) for c in super().generate(requests, sampling)
        ]


@fault(CLAIMS, "test_sleeps_before_the_first_sync")
class ClaimsToSleep(Plain):
    """Claims to sleep and cannot."""

    capabilities = EngineCapabilities(sleep=True)


@fault(CLAIMS, "test_routed_experts_are_of_their_tokens")
class ClaimsExperts(Plain):
    """Claims routed experts and returns none."""

    capabilities = EngineCapabilities(routed_experts=True)

    def _experts(self, num_tokens, recorded):
        return None


@fault(CLAIMS, "test_updates_while_requests_run")
class ClaimsUpdatesInFlight(Capable):
    """Claims updates in flight and loses what runs."""

    capabilities = EngineCapabilities(sleep=True, streaming=True, in_flight_update=True)

    def update_weights(self, buckets, version):
        self.abort(list(self._unfinished))
        return super().update_weights(buckets, version)


@fault(CLAIMS, "test_a_stopped_call_answers_every_request")
class LosesLogprobsWhenStopped(Plain):
    """Returns the tokens so far when it is stopped midway, and zeros for their logprobs."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        return [
            dataclasses.replace(c, logprobs=0 * c.logprobs) if c.finish_reason == "abort" else c
            for c in super().generate(requests, sampling)
        ]


@fault(CLAIMS, "test_a_start_takes_what_it_is_given")
class KeepsItsFirstEndTokens(Plain):
    """Starts again with the end tokens of its first start."""

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._ends = self.__dict__.get("_ends", policy.eos_token_ids)
        super().start(dataclasses.replace(policy, eos_token_ids=self._ends), placement)


@fault(CLAIMS, "test_close_leaves_nothing_behind")
class KeepsModelsByPath(Plain):
    """Keeps what it has built by the model's folder, so that a restart is quick."""

    models: ClassVar[dict[str, dict[str, Any]]] = {}

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        if policy.path not in self.models:
            super().start(policy, placement)
            self.models[policy.path] = vars(self).copy()
        vars(self).update(self.models[policy.path], _policy=policy)


@fault(CLAIMS, "test_a_stopped_call_answers_every_request")
class RaisesWhenStopped(Plain):
    """Raises when the run is told to stop."""

    def generate(self, requests, sampling):
        if self.is_stopping():
            raise RuntimeError("stopped")
        return super().generate(requests, sampling)


@fault(CLAIMS, "test_a_stopped_call_answers_every_request")
class ReturnsNothingWhenStopped(Plain):
    """Returns no completions when the run is told to stop."""

    def generate(self, requests, sampling):
        return [] if self.is_stopping() else super().generate(requests, sampling)


@fault(CLAIMS, "test_a_stopped_call_answers_every_request")
class SaysCompleteWhenStopped(Plain):
    """Returns what it has as complete when the run is told to stop."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        completions = super().generate(requests, sampling)
        if not self.is_stopping():
            return completions
        return [dataclasses.replace(c, finish_reason="stop") for c in completions]


class ChangesAtStart(Plain):
    """Changes something of its process when it starts."""

    def change(self) -> None:
        raise NotImplementedError

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        self.change()


@fault(PROCESS, STATE)
class SetsTheDefaultDtype(ChangesAtStart):
    """Sets torch's default dtype."""

    def change(self):
        torch.set_default_dtype(torch.float64)


@fault(PROCESS, STATE)
class SetsThreads(ChangesAtStart):
    """Sets the number of torch's threads."""

    def change(self):
        torch.set_num_threads(torch.get_num_threads() + 1)


@fault(PROCESS, STATE)
class TakesSignals(ChangesAtStart):
    """Installs a handler of SIGTERM."""

    def change(self):
        signal.signal(signal.SIGTERM, lambda *_: None)


@fault(PROCESS, STATE)
class DisablesGradients(Plain):
    """Leaves gradients disabled after ``generate``."""

    def generate(self, requests, sampling):
        torch.set_grad_enabled(False)
        return super().generate(requests, sampling)


@fault(PROCESS, STATE)
class SetsVariables(ChangesAtStart):
    """Sets an environment variable, which later child processes inherit."""

    def change(self):
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"


@fault(PROCESS, STATE)
class ChangesTheFolder(ChangesAtStart):
    """Changes the working directory."""

    def change(self):
        os.chdir("/")


@fault(PROCESS, STATE)
class StopsTheGarbageCollector(ChangesAtStart):
    """Disables Python's garbage collector."""

    def change(self):
        gc.disable()


@fault(PROCESS, STATE)
class SetsASocketDeadline(ChangesAtStart):
    """Sets the default timeout of sockets."""

    def change(self):
        socket.setdefaulttimeout(3.0)


@fault(PROCESS, STATE)
class TakesTheRootLogger(ChangesAtStart):
    """Sets the level of the root logger."""

    def change(self):
        logging.getLogger().setLevel(logging.CRITICAL)


@fault(PROCESS, STATE)
class SilencesWarnings(ChangesAtStart):
    """Ignores all warnings from then on."""

    def change(self):
        warnings.simplefilter("ignore")


@fault(PROCESS, STATE)
class ShadowsModules(ChangesAtStart):
    """Puts a folder at the start of ``sys.path``."""

    def change(self):
        sys.path.insert(0, "/tmp")


@fault(PROCESS, STATE)
class WantsDeterminism(ChangesAtStart):
    """Turns deterministic algorithms on for the trainer too."""

    def change(self):
        torch.use_deterministic_algorithms(True, warn_only=True)


@fault(PROCESS, STATE)
class LowersMatmulPrecision(ChangesAtStart):
    """Lowers the precision of float32 products."""

    def change(self):
        torch.set_float32_matmul_precision("medium")


@fault(PROCESS, "test_global_random_generators_are_left_alone")
class SeedsNumpy(Plain):
    """Seeds NumPy's global generator in a sync."""

    def update_weights(self, buckets, version):
        numpy.random.seed(0)
        return super().update_weights(buckets, version)


@fault(PROCESS, "test_global_random_generators_are_left_alone")
class SeedsAtStart(ChangesAtStart):
    """Seeds Python's global generator at its start."""

    def change(self):
        random.seed(0)


@fault(PROCESS, "test_stats_are_finite")
class CountsInIntegers(Plain):
    """Returns integers among its counters."""

    def stats(self):
        return {"num_tokens": 3}


@fault(PROCESS, "test_close_leaves_nothing_behind")
class LeavesAThread(ChangesAtStart):
    """Leaves a thread running when it is closed."""

    def change(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@fault(PROCESS, "test_closes_before_it_was_started")
class ClosesOnlyWhatRuns(Plain):
    """Cannot be closed before it was started."""

    def close(self) -> None:
        assert self._device is not None
        super().close()


@fault(CLAIMS, "test_what_it_gets_is_left_as_it_was")
class TakesItsOptionsOut(Plain):
    """Takes its own options out of the sampling that it was passed, and later calls lack them."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        own = {name: sampling.extra.pop(name) for name in sampling.extra.keys() & {"min_p"}}
        return super().generate(requests, dataclasses.replace(sampling, extra=own))


@fault(CLAIMS, "test_options_of_its_own_have_an_effect")
class IgnoresItsOptions(Plain):
    """Names options of its own sampling, and leaves them out."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        return super().generate(requests, dataclasses.replace(sampling, extra={}))
