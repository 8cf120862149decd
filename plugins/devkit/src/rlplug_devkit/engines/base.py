"""Base class of all groups of checks: the engine's settings, which a subclass overrides, and the shared bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import pytest
import torch

from rlplug.interfaces.rollout import Placement, RolloutEngine
from rlplug.rollout.engine_states import device_bytes_in_use
from rlplug_devkit.claims import DOES_NOT_APPLY, ConformanceReport, claim_of, engine_claims
from rlplug_devkit.engines.bench import Bench, BenchSettings
from rlplug_devkit.kit import Kit
from rlplug_devkit.models import MAX_CONTEXT, Family, make_model_folder
from rlplug_devkit.process_state import holdings, return_blocks_when_freed
from rlplug_devkit.reference import FLOAT32, FP8, Tolerances


class EngineChecks(Kit):
    """Settings of an engine under test. A subclass must override ``make_engine``, and may override the rest.

    Attributes:
        dtype: Dtype in which weights are sent, and in which the engine computes.
        tolerances: Largest differences from the reference's logprobs; ``BFLOAT16`` for an engine that computes in
            bfloat16.
        fp8_tolerances: Largest differences for an engine that computes in FP8, from a reference that rounds only the
            weights.
        seed_is_exact: Whether a request's tokens are the same in every batch. False for kernels that are not
            batch-invariant: then nine in ten of the first tokens must be the same.
        model_folder: Folder of a model of the Llama family, with weights, instead of the tiny one.
        tied_model_folder: Folder of a model with tied embeddings, with weights, instead of the tiny Qwen2.
        fp8_model_folder: Folder of a model whose matrices divide into blocks of 128, with weights, instead of the tiny
            one.
        weight_change: Noise on weights before a sync, in their standard deviations. On the tiny models, 1 makes every
            tensor matter; a deep model of your own would be chaotic in bfloat16, and needs about 0.1.
        max_context: Context length in tokens. For an engine that streams, a completion of it must take longer than a
            second.
        num_draws: Number of completions in the test of their distribution.
        deadline_s: Longest time in seconds for a completion of a streaming engine.
        min_freed_bytes: Smallest number of bytes that sleep must free; the size of the weights by default, nine tenths
            on a CPU.
        sampling_extra: Options of engines' own to sample with, where the engine's ``sampling_extra`` names them.
        changes_of_process: Settings of the trainer's process that the engine has to change, by the names that the check
            of them uses.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    tolerances: ClassVar[Tolerances] = FLOAT32
    fp8_tolerances: ClassVar[Tolerances] = FP8
    seed_is_exact: ClassVar[bool] = True
    model_folder: ClassVar[str | None] = None
    tied_model_folder: ClassVar[str | None] = None
    fp8_model_folder: ClassVar[str | None] = None
    weight_change: ClassVar[float] = 1.0
    max_context: ClassVar[int] = MAX_CONTEXT
    num_draws: ClassVar[int] = 2000
    deadline_s: ClassVar[float] = 60.0
    min_freed_bytes: ClassVar[int | None] = None
    sampling_extra: ClassVar[Mapping[str, Any]] = MappingProxyType({"min_p": 0.1})
    changes_of_process: ClassVar[frozenset[str]] = frozenset()

    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: an engine may wait for ever
    _bench: ClassVar[Bench | None] = None
    _environment: ClassVar[pytest.MonkeyPatch] = pytest.MonkeyPatch()

    def make_engine(self) -> RolloutEngine:
        """Return an engine that is not started yet."""
        raise NotImplementedError(f"{type(self).__name__}.make_engine must return the engine to test")

    def placement(self) -> Placement:
        """Return where the engine runs: the first GPU when there is one."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return Placement(device, rank=0, world_size=1)

    def device_bytes_in_use(self, engine: RolloutEngine) -> int | None:
        """Return the bytes in use on the engine's device, by any process; ``None`` when that is unknown.

        On a CPU they are those of this process and of all below it.
        """
        device = self.placement().device
        if device.type == "cpu":
            return holdings().num_bytes
        return device_bytes_in_use(device) if device.type == "cuda" else None

    @classmethod
    def teardown_class(cls) -> None:
        if cls._bench is not None:
            cls._bench.discard()
            cls._bench = None
        cls._environment.undo()

    @pytest.fixture(autouse=True)
    def bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
        """Yield the class's bench. A failed check may leave the engine in any state, so the next one gets another."""
        cls = type(self)
        if cls._bench is None:
            return_blocks_when_freed(cls._environment)
            cls._bench = Bench(self._settings(tmp_path_factory.getbasetemp()))
        bench = cls._bench
        self._apply_claim(request, bench)
        num_failed = request.session.testsfailed
        yield bench
        if request.session.testsfailed > num_failed:
            bench.discard()

    def _settings(self, folder: Path) -> BenchSettings:
        named: dict[Family, str | None] = {  # folders of the others are made
            "llama": self.model_folder,
            "qwen2": self.tied_model_folder,
            "fp8": self.fp8_model_folder,
        }
        folders: dict[Family, Path] = {}
        for family in get_args(Family):
            path = named.get(family)
            folders[family] = Path(path) if path else folder / f"rlplug-conformance-{family}"
            if path is None and not folders[family].exists():
                make_model_folder(family, folders[family])
        return BenchSettings(
            self.make_engine,
            folders,
            self.dtype,
            self.max_context,
            self.placement(),
            self.tolerances,
            self.fp8_tolerances,
            self.weight_change,
        )

    def _apply_claim(self, request: pytest.FixtureRequest, bench: Bench) -> None:
        """Add the check to the report under its capability, and skip it when it does not apply to this engine."""
        claim, tests = claim_of(request.function), request.node.nodeid.rpartition("::")[0]
        ConformanceReport.of(request.config).include(tests, bench.engine_name, engine_claims(bench.capabilities))
        request.node.user_properties.append(("rlplug_claim", claim.capability))
        if not claim.fits(bench.capabilities):
            verb = "does not claim" if claim.is_claimed else "claims"
            pytest.skip(f"{DOES_NOT_APPLY}{bench.engine_name} {verb} {claim.capability!r}")
