"""``OptimizationConformance``: checks that every optimization must pass."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

import pytest
from torch import Tensor

from rlplug.errors import describe
from rlplug.interfaces.memory import ActivationTraits
from rlplug.interfaces.optimization import Network, Optimization
from rlplug_devkit.claims import DOES_NOT_APPLY, ConformanceReport
from rlplug_devkit.optimizations.bench import MESHES, OptimizationBench
from rlplug_devkit.optimizations.ranks import PLAIN, PLAIN_AGAIN, WITH_PARTNER
from rlplug_devkit.trainers.base import TrainerChecks
from rlplug_devkit.trainers.bench import assert_close

EVERY_OPTIMIZATION = "every check"


class OptimizationConformance:
    """All checks of optimizations, to subclass in a test module that returns them from ``make_optimizations``.

    Tiny models are built, sharded and loaded as a run does it, in float32 on CPUs: by one rank in the test's process,
    and by two processes (gloo). The checks compare a policy with the optimization to one without: logprobs, entropies,
    gradients, micro-batches, the weights that a sync sends, and a step after a resume. Each variant also runs together
    with another optimization, which recomputes whole blocks. Processes are started once for all checks. A variant that
    refuses one of the two meshes with a ConfigError is skipped there. GPUs, bf16, time and memory are not checked.

    Example::

        class TestMine(OptimizationConformance):
            def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
                return {"every block": [Mine()], "every second block": [Mine(every=2)]}

    Attributes:
        models: Names of the models to check, of ``TINY_MODELS``.
        meshes: ``1 rank`` and ``2 ranks``, or one of them.
        changes_of_process: Settings of the process that the optimizations have to change, by the names that the check
            uses.
        with_partner: Whether variants are checked with recomputed blocks too; false where both conflict.
        tolerance: Largest difference of logprobs and entropies from the plain path's, as a share of the largest.
        gradient_tolerance: Largest difference of a gradient or a weight from the plain path's, as a share of the
            largest of its tensor.
    """

    models: ClassVar[Sequence[str]] = ("llama", "tied_llama")
    meshes: ClassVar[Sequence[str]] = tuple(MESHES)
    changes_of_process: ClassVar[frozenset[str]] = frozenset()
    with_partner: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5
    gradient_tolerance: ClassVar[float] = 1e-4
    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: a rank may wait for ever
    _bench: ClassVar[OptimizationBench | None] = None

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        """Return the optimizations to apply together, by a name of your own; classes must be importable by ranks."""
        raise NotImplementedError(f"{type(self).__name__}.make_optimizations must return what to test")

    def trains(self, name: str) -> bool:
        """Return whether the weight of this name in a checkpoint trains; one that does not must have no gradient."""
        return True

    def run_ranks(self, command: list[str], world_size: int) -> None:
        """Run ``python *command`` once per rank, with torchrun's variables; raise with the output where one fails."""
        TrainerChecks.run_ranks(self, command, world_size)  # type: ignore[arg-type]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each check that asks for them every model, mesh and variant."""
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)
        if "mesh" in metafunc.fixturenames:
            metafunc.parametrize("mesh", self.meshes)
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", list(self.make_optimizations()))

    @classmethod
    def teardown_class(cls) -> None:
        cls._bench = None

    @pytest.fixture(autouse=True)
    def bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OptimizationBench:
        """Return the class's bench."""
        cls = type(self)
        if cls._bench is None:
            folder = tmp_path_factory.mktemp(cls.__name__)
            cls._bench = OptimizationBench(
                self.make_optimizations(), self.models, self.with_partner, self.run_ranks, folder
            )
        tests = request.node.nodeid.rpartition("::")[0]
        ConformanceReport.of(request.config).include(tests, cls.__name__, {EVERY_OPTIMIZATION: None})
        request.node.user_properties.append(("rlplug_claim", EVERY_OPTIMIZATION))
        return cls._bench

    # ---- the object ------------------------------------------------------------------------------------------------

    def test_it_can_be_copied(self, variant: str) -> None:
        """Each model of a run has a copy, and each rank another."""
        for each in self.make_optimizations()[variant]:
            try:
                copy.deepcopy(each)
                pickle.dumps(each)
            except Exception as error:  # noqa: BLE001 - the optimization's own
                pytest.fail(
                    f"{type(each).__name__} cannot be copied: {describe(error)}. Make what cannot in before_shard.",
                    pytrace=False,
                )

    def test_without_a_model_it_claims_no_effect(self, variant: str) -> None:
        for each in self.make_optimizations()[variant]:
            try:
                found = each.effects()
            except Exception:  # noqa: BLE001 - a run asks after both edits
                continue
            assert found == [], (
                f"{type(each).__name__} claims {[effect.description for effect in found]} before it saw a model: "
                "look at the model in effects(), as a person would who doubts it."
            )

    def test_its_claims_are_well_formed(self, variant: str) -> None:
        """``applies_to``, ``conflicts``, ``only_if_needed`` and ``plan_memory`` are read before there is a model."""
        for each in self.make_optimizations()[variant]:
            name = type(each).__name__
            unknown = sorted({*each.applies_to} - {*get_args(Network)})
            assert each.applies_to and not unknown, (  # noqa: PT018
                f"applies_to of {name} is {each.applies_to}: give one or more of {get_args(Network)}."
            )
            for other, reason in each.conflicts.items():
                assert other != name, f"{name} conflicts with itself: name other classes."
                assert isinstance(reason, str), f"conflicts of {name} has no reason for {other}: say why in a sentence."
                assert reason.strip(), f"conflicts of {name} has no reason for {other}: say why in a sentence."
            assert isinstance(each.only_if_needed, bool), f"only_if_needed of {name} is {each.only_if_needed!r}."
            given = ActivationTraits()
            try:
                first, second = (each.plan_memory(given) for _ in range(2))
            except Exception as error:  # noqa: BLE001 - the optimization's own
                pytest.fail(f"plan_memory of {name} raised {describe(error)} before there was a model.", pytrace=False)
            assert isinstance(first, ActivationTraits), f"plan_memory of {name} returned a {type(first).__name__}."
            assert given == ActivationTraits(), f"plan_memory of {name} changed its argument: return replace(...)."
            assert first == second, f"plan_memory of {name} returned {second} in a second call, and {first} before."
            assert not each.only_if_needed or first != given, (
                f"{name} is used only if memory is needed, and by its plan_memory it saves none."
            )

    # ---- building --------------------------------------------------------------------------------------------------

    def test_it_takes_effect(self, bench: OptimizationBench, model: str, variant: str) -> None:
        """On one of the meshes at least; a variant may refuse the other."""
        built = {mesh: bench.outcome(model, mesh, variant, "build") for mesh in self.meshes}
        refusals = [outcome["refused"] for outcome in built.values() if "refused" in outcome]
        assert len(refusals) < len(built), f"{variant} is refused on every mesh: {refusals[0]}"
        for mesh, outcome in built.items():
            if "refused" in outcome:
                continue
            effects = bench.value(model, mesh, variant, "build")["effects"]
            assert effects, f"{variant} has no effect on {model}."
            unclear = [text for text in effects if not isinstance(text, str) or not text.strip()]
            assert not unclear, f"{variant} describes an effect as {unclear[0]!r}: say what was changed, and how often."

    def test_building_changes_nothing_else(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Neither random generators, nor the process."""
        built, plain = (bench.value(model, mesh, name, "build") for name in (variant, PLAIN))
        assert not built["moved"], f"{variant} moves the global random generators {built['moved']}."
        changed = sorted({*built["changed"]} - {*plain["changed"]})
        assert not changed, f"{variant} changes {changed} of the process, for all others too."

    def test_an_effect_is_in_the_model(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """What ``effects`` reports is an edit of modules, attributes, hooks or sharding, which can be seen."""
        found, plain, again = (
            bench.value(model, mesh, name, "structure")["modules"] for name in (variant, PLAIN, PLAIN_AGAIN)
        )
        edited = [name for name in found if plain.get(name) == again.get(name) != found[name]]
        claims = bench.value(model, mesh, variant, "build")["effects"]
        assert edited, f"{variant} claims {claims}, and the model is as it is without: nothing was changed."

    def test_each_rank_reports_the_same(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        of_ranks = bench.value(model, mesh, variant, "build")["of ranks"]
        assert all(effects == of_ranks[0] for effects in of_ranks), (
            f"{variant} reports {of_ranks} on the ranks of {mesh}: edit the model alike on each, or ranks wait for "
            "each other for ever."
        )

    def test_a_sync_sends_the_same_weights(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        found, expected = (dict(bench.value(model, mesh, name, "sync")) for name in (variant, PLAIN))
        advice = "Wrap forward methods rather than modules, so that names of parameters stay, and leave values alone."
        assert_close(found, expected, 0.0, f"weights of {model} on {mesh} with {variant}", advice)

    def test_parameters_and_checkpoints_are_the_same(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """A run may resume with the optimization or without it."""
        found, plain = (dict(bench.value(model, mesh, name, "structure")) for name in (variant, PLAIN))
        weights = {name: text if self.trains(name) else f"{text}, frozen" for name, text in plain["parameters"].items()}
        plain["parameters"] = weights
        plain["checkpoint"] = [name for name in plain["checkpoint"] if self.trains(name)]
        plain["optimizer"] = [[name for name in group if self.trains(name)] for group in plain["optimizer"]]
        for part in ("parameters", "buffers", "checkpoint", "optimizer", "training"):
            assert found[part] == plain[part], (
                f"{part} of {model} on {mesh} with {variant} differ: {_first_difference(found[part], plain[part])}. "
                "Names, dtypes, shapes and what trains stay; override trains() for weights that do not train."
            )

    # ---- values and gradients --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("packing", ["packed", "alone"])
    def test_values_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str, packing: str
    ) -> None:
        """Logprobs and entropies of passes without gradients, of a packed row and of single sequences."""
        self._assert_values(bench, model, mesh, variant, packing)

    def test_gradients_equal_the_plain_path(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        self._assert_gradients(bench, model, mesh, variant, "gradients")

    def test_micro_batches_add_up(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        self._assert_gradients(bench, model, mesh, variant, "split")

    def test_a_step_changes_the_weights_alike(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        found, before, expected = (
            bench.value(model, mesh, variant, "step")["weights"],
            dict(bench.value(model, mesh, PLAIN, "sync")),
            bench.value(model, mesh, PLAIN, "step")["weights"],
        )
        expected = {name: tensor if self.trains(name) else before[name] for name, tensor in expected.items()}
        advice = "The optimizer must have the parameters that the model computes with."
        what = f"weights of {model} after a step with {variant} on {mesh}"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_a_resume_repeats_the_next_step(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        resumed = bench.value(model, mesh, variant, "resume")
        advice = "A checkpoint has parameters and optimizer states under the names that the plain model has."
        what = f"weights of {model} after a resume with {variant} on {mesh}"
        assert_close(dict(resumed["resumed"]), dict(resumed["went on"]), self.gradient_tolerance, what, advice)

    def test_later_steps_change_the_weights_alike(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """The second step, after a sync and a checkpoint."""
        found, expected = (dict(bench.value(model, mesh, name, "resume")["went on"]) for name in (variant, PLAIN))
        before = dict(bench.value(model, mesh, PLAIN, "sync"))
        expected = {name: tensor if self.trains(name) else before[name] for name, tensor in expected.items()}
        advice = "Keep nothing of a pass, of a sync or of the weights for a later step."
        what = f"weights of {model} after two steps with {variant} on {mesh}"
        assert_close(found, expected, self.gradient_tolerance, what, advice)

    def test_an_export_is_the_same(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Configuration, generation configuration and tokenizer; weights may differ by round-off of a step."""
        found, expected = (bench.value(model, mesh, name, "exported") for name in (variant, PLAIN))
        assert found.keys() == expected.keys(), f"with {variant} an export has the files {sorted(found)}."
        wrong = [name for name in found if name.endswith(".json") and found[name] != expected[name]]
        assert not wrong, (
            f"with {variant} the exported {wrong} differ from those of the plain model: an engine would load another "
            "one. Leave model.config and model.generation_config alone."
        )

    def test_a_pass_of_no_tokens_adds_nothing(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """A rank without rows left takes passes in which no token trains, so that all ranks take as many."""
        found, plain = (bench.value(model, mesh, name, "nothing") for name in (variant, PLAIN))
        assert not bool(found["values"].any()), f"{variant} has logprobs of tokens that do not train."
        wrong = [name for name, gradient in found["gradients"].items() if not bool((gradient == 0).all())]
        assert not wrong, f"with {variant} a pass in which no token trains has gradients to {wrong[:3]}."
        assert found["gradients"].keys() <= plain["gradients"].keys(), f"{variant} adds gradients to a pass of nothing."

    def test_two_models_do_not_share(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Policy, reference and critic live in one process, each with a copy of the optimization."""
        found, plain = (bench.value(model, mesh, name, "beside") for name in (variant, PLAIN))
        advice = "Keep what belongs to a model in self, not in the class, the module or a global table."
        what = f"values of {model} on {mesh} with {variant}, beside a second model"
        assert_close({"after": found["after"]}, {"after": found["before"]}, self.tolerance, what, advice)
        assert_close({"other": found["other"]}, {"other": plain["other"]}, self.tolerance, what, advice)

    def test_a_reference_has_the_same_values(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """One that applies to it: a frozen model that runs forward only."""
        if not any("reference" in each.applies_to for each in bench.variants[variant]):
            pytest.skip(f"{DOES_NOT_APPLY}applies_to of {variant} has no reference")
        found, plain = (bench.value(model, mesh, name, "reference") for name in (variant, PLAIN))
        assert len(found["effects"]) > len(plain["effects"]), (
            f"{variant} applies to a reference policy, and claims no effect on one: leave it out of applies_to."
        )
        what = f"values of a reference {model} on {mesh} with {variant}"
        assert_close({"": found["values"]}, {"": plain["values"]}, self.tolerance, what, "Values must be the same.")

    def test_it_works_with_another_optimization(
        self, bench: OptimizationBench, model: str, mesh: str, variant: str
    ) -> None:
        """With blocks that are computed again in the backward pass, as by gradient checkpointing."""
        if not self.with_partner:
            pytest.skip(f"{DOES_NOT_APPLY}with_partner is False")
        both = f"{variant}{WITH_PARTNER}"
        self._assert_values(bench, model, mesh, both, "packed")
        self._assert_gradients(bench, model, mesh, both, "gradients")

    def test_the_plain_path_is_left_as_it_was(self, bench: OptimizationBench, model: str, mesh: str) -> None:
        """A model that the process builds later, without optimizations, computes the same bits."""
        for probe in ("forward", "gradients"):
            found, expected = (bench.value(model, mesh, name, probe) for name in (PLAIN_AGAIN, PLAIN))
            advice = "Change this model's modules, not classes or functions of a library."
            assert_close(found, expected, 0.0, f"a model without optimizations, built later: {probe}", advice)

    def test_the_process_is_left_as_it_was(self, bench: OptimizationBench, model: str, mesh: str, variant: str) -> None:
        """Nor the files of the model's folder, from which engines and later runs load."""
        found, plain = (bench.value(model, mesh, name, "process") for name in (variant, PLAIN))
        changes = [text for name, text in found.items() if name not in plain and name not in self.changes_of_process]
        assert not changes, (
            f"with {variant} {'; '.join(changes)}. The run and all other plugins share them: restore what a call sets."
        )

    def _assert_values(self, bench: OptimizationBench, model: str, mesh: str, variant: str, packing: str) -> None:
        found, expected = (
            dict(zip(("logprobs", "entropies"), bench.value(model, mesh, name, "forward")[packing], strict=True))
            for name in (variant, PLAIN)
        )
        what = f"{packing}: {model} on {mesh} with {variant}"
        assert_close(found, expected, self.tolerance, what, "Values must be the same.")

    def _assert_gradients(self, bench: OptimizationBench, model: str, mesh: str, variant: str, probe: str) -> None:
        found: dict[str, Tensor] = bench.value(model, mesh, variant, probe)
        everything: dict[str, Tensor] = bench.value(model, mesh, PLAIN, probe)
        expected = {name: gradient for name, gradient in everything.items() if self.trains(name)}
        advice = "A backward pass must see what the forward pass did. Override trains() for weights that do not train."
        what = f"gradients of {model} on {mesh} with {variant} ({probe})"
        assert_close(found, expected, self.gradient_tolerance, what, advice)


def _first_difference(found: Any, expected: Any) -> str:
    """Return in words where two descriptions differ."""
    if isinstance(found, dict):
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        return f"{names[0]} is {found.get(names[0])}, and without {expected.get(names[0])}"
    if isinstance(found, list):
        others = sorted(map(str, [name for name in [*found, *expected] if (name in found) != (name in expected)]))
        return f"{others[:1]} is in one of them" if others else "another order"
    return f"{found}, and without {expected}"
