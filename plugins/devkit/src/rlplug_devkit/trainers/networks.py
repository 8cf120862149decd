"""Checks of networks and claims: what is built, what each rank holds of it, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from transformers import T5Config

from rlplug.distributed.mesh import AXES
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig, TrainerClaims
from rlplug.setup.checks.trainer import check_trainer
from rlplug.types import MeshSizes
from rlplug_devkit.trainers.base import TrainerChecks
from rlplug_devkit.trainers.bench import INDIVISIBLE, TrainerBench
from rlplug_devkit.trainers.measured import KEY, run_config

ONE_RANK = MeshSizes(1, 1, 1, 1)


class NetworkChecks(TrainerChecks):
    """Checks of networks before they train."""

    def test_empty_network_takes_no_memory(self, bench: TrainerBench, model: str) -> None:
        found = bench.value(model, next(iter(bench.meshes)), "empty")
        made = found["off meta"]
        assert not made, (
            f"empty_network of {model} made {made[0]!r} and {len(made) - 1} more parameters off the meta device: build "
            "under torch.device('meta'), or a large model would not fit."
        )
        assert found["dtypes"] == ["torch.float32"], (
            f"parameters of {model} are {found['dtypes']}: the optimizer works on float32, and FSDP2 casts them."
        )
        assert found["training"], f"empty_network returned {model} in evaluation mode: call train()."
        assert not found["missing"], f"the network of {model} lacks {found['missing']}, which the core reads."

    def test_blocks_gather_their_parameters_on_their_own(self, bench: TrainerBench, model: str) -> None:
        share = bench.value(model, next(iter(bench.meshes)), "empty")["gathered at once"]
        assert share < 0.6, (
            f"{share:.0%} of the parameters of {model} would be gathered at once: fsdp_units must return each of its "
            "blocks, and the embeddings and the output layer where they are not tied."
        )

    def test_every_rank_keeps_its_part(self, bench: TrainerBench, model: str, mesh: str) -> None:
        """Axes other than ``replicate`` split parameters; embeddings and norms may stay whole on the tensor axis."""
        shares, sizes = bench.value(model, mesh, "build")["shares"], bench.meshes[mesh]
        num_parts = sizes.world_size // sizes.replicate
        most = 1.0 if num_parts == 1 else 1.5 / num_parts
        assert max(shares) <= most, (
            f"ranks of {mesh} hold {', '.join(f'{share:.0%}' for share in shares)} of the parameters of {model}, and "
            f"{most:.0%} is the most: split must replace parameters by DTensors of which each rank of the tensor axis "
            "holds its part. Leave an axis that splits nothing out of claims.axes."
        )

    def test_global_random_generator_is_left_alone(self, bench: TrainerBench, model: str, mesh: str) -> None:
        assert bench.value(model, mesh, "build")["generator is left"], (
            f"building {model} on {mesh} moved torch's global generator, and a run would depend on what it loaded: "
            "draw inside torch.random.fork_rng()."
        )


class RefusalChecks(TrainerChecks):
    """Checks of claims, and of what is refused before anything is loaded."""

    def test_claims_are_known(self, bench: TrainerBench) -> None:
        claims = getattr(bench.trainer, "claims", None)
        assert isinstance(claims, TrainerClaims), f"{bench.name}.claims is {claims!r}: set it to a TrainerClaims."
        unknown = claims.axes - set(AXES)
        assert not unknown, f"claims.axes has {sorted(unknown)}: the mesh has the axes {', '.join(AXES)}."

    def test_what_it_trains_is_not_refused(self, bench: TrainerBench, model: str) -> None:
        config = ModelConfig(str(bench.model_folder(model)), dtype="float32")
        try:
            check_trainer(run_config(bench.trainer, config), next(iter(bench.meshes.values())))
        except ConfigError as refusal:
            pytest.fail(f"{bench.name} refuses {model}, which is in the test's models: {refusal}")

    @pytest.mark.parametrize("axis", [axis for axis in AXES if axis != "shard"])
    def test_axis_is_claimed_or_refused(self, bench: TrainerBench, axis: str) -> None:
        """A claimed axis must work with some model; the checks of passes see that it works."""
        if axis in bench.trainer.claims.axes:
            mesh = f"{axis} 2"
            if mesh not in bench.meshes:
                pytest.skip(f"{mesh} is not in meshes")
            refusals = [bench.outcome(model, mesh, "build").get("refused") for model in bench.models]
            assert not all(refusals), f"{bench.name} claims {axis}, and refuses each model on it: {refusals[0]}"
            return
        model = next(iter(bench.models))
        config = ModelConfig(str(bench.model_folder(model)), dtype="float32")
        with pytest.raises(ConfigError) as refusal:  # noqa: PT012 - says what was expected
            check_trainer(run_config(bench.trainer, config), dataclasses.replace(ONE_RANK, **{axis: 2}))
            pytest.fail(f"{bench.name} does not claim {axis}, and a run with {axis} 2 was not refused.")
        assert f"trainer.strategy.init_args.{axis}" in str(refusal.value)

    def test_unknown_model_type_is_refused(self, bench: TrainerBench, tmp_path: Path) -> None:
        """T5 is an encoder with a decoder, which no trainer of causal language models has."""
        T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=64).save_pretrained(tmp_path)
        config = ModelConfig(str(tmp_path), dtype="float32")
        what = "a model of type t5 must be refused by check or empty_network with a ConfigError that names model.policy"
        with pytest.raises(ConfigError) as refusal:  # noqa: PT012 - says what was expected
            check_trainer(run_config(bench.trainer, config), next(iter(bench.meshes.values())))
            bench.trainer.empty_network(config, KEY)
            pytest.fail(f"{what}, and {bench.name} built it.")
        assert KEY in str(refusal.value), f"{what}, and the message does not: {refusal.value}"

    def test_sizes_that_do_not_divide_are_refused(self, bench: TrainerBench) -> None:
        """Two ranks of the tensor axis cannot share three heads."""
        if "tensor" not in bench.trainer.claims.axes:
            pytest.skip(f"does not apply: {bench.name} does not claim 'tensor'")
        if "tensor 2" not in bench.meshes:
            pytest.skip("tensor 2 is not in meshes")
        model = INDIVISIBLE.format(next(iter(bench.models)))
        outcome = bench.outcome(model, "tensor 2", "build")
        what = f"{model} must be refused on tensor 2, by check or split, with a ConfigError that names the tensor axis"
        assert "value" not in outcome, f"{what}: {bench.name} built it."
        message = outcome.get("refused")
        assert message, f"{what}: {bench.name} raised\n{outcome['error']}"
        assert "tensor is 2" in message or KEY in message, f"{what}, and the message does not: {message}"
