"""Checks of weights: what a sync sends, what an export holds, and what a checkpoint brings back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from rlplug.interfaces.weight_sync import FP8Weights
from rlplug.models.hf_files import pretrained
from rlplug.weight_sync.fp8_quantize import quantize_blocks
from rlplug_devkit.trainers.base import TrainerChecks
from rlplug_devkit.trainers.bench import TrainerBench, assert_close, assert_equal
from rlplug_devkit.trainers.cases import LEARNING_RATE
from rlplug_devkit.trainers.measured import RANDOM_SEED
from rlplug_devkit.trainers.reference import drawn_weights, reference_logprobs

ADVICE = (
    "hf_weights must name each weight of the Hugging Face checkpoint once, tied ones under the first name, and convert "
    "a whole parameter to exactly what the folder had (rows that the library permutes, matrices that it fuses); "
    "load_weights must do the reverse."
)


class SyncChecks(TrainerChecks):
    """Checks of what a weight sync sends."""

    def test_sync_sends_each_weight_once(self, bench: TrainerBench, model: str, mesh: str) -> None:
        sent, what = bench.value(model, mesh, "sync"), f"weights of {model} that a sync on {mesh} sends"
        assert_once(sent, what)
        assert_equal(dict(sent), bench.reference(model).weights, what, ADVICE)

    def test_sync_in_fp8_sends_values_and_scales(self, bench: TrainerBench, model: str, mesh: str) -> None:
        sent, what = bench.value(model, mesh, "sync_fp8"), f"weights of {model} that a sync in FP8 on {mesh} sends"
        assert_once(sent, what)
        expected: dict[str, Tensor] = {}
        for name, weight in bench.reference(model).weights.items():
            if "proj" not in name:
                expected[name] = weight
                continue
            expected[name], expected[FP8Weights.scale_name(name)] = quantize_blocks(weight, torch.float32, False)
        advice = "first_row and shape of an HFWeight say which rows of the parameter it is, and so which scales it has."
        assert_equal(dict(sent), expected, what, f"{advice} {ADVICE}")

    def test_sync_after_a_step_sends_new_weights(self, bench: TrainerBench, model: str, mesh: str) -> None:
        reference, step = bench.reference(model), bench.value(model, mesh, "step")
        what = f"weights of {model} that a sync on {mesh} sends after a step"
        assert_once(step["weights"], what)
        changes = {name: tensor - reference.weights.get(name, 0.0) for name, tensor in step["weights"]}
        expected = {name: reference.stepped[name] - weight for name, weight in reference.weights.items()}
        round_off = 20 * self.gradient_tolerance  # the difference of two float32 weights, beside one step
        advice = (
            f"they must be what SGD with a learning rate of {LEARNING_RATE} makes of transformers' gradients. A sync "
            "must read parameters anew, and each parameter must train."
        )
        assert_close(changes, expected, round_off, f"changes of {what}", advice)

    def test_random_weights_are_those_of_transformers(self, bench: TrainerBench, model: str, mesh: str) -> None:
        found = dict(bench.value(model, mesh, "random"))
        expected = drawn_weights(bench.model_folder(model), RANDOM_SEED)
        advice = (
            "with init: random, they must be those of TransformersTrainer, so that runs can be compared: "
            "rlplug.models.loading.stored_weights yields them on every rank."
        )
        assert_equal(found, expected, f"weights of {model} drawn on {mesh}", advice)


class FolderChecks(TrainerChecks):
    """Checks of exports and checkpoints."""

    def test_export_opens_in_transformers(self, bench: TrainerBench, model: str, mesh: str) -> None:
        """The export is of the policy after a step."""
        folder, step = Path(bench.value(model, mesh, "export")), bench.value(model, mesh, "step")
        what = f"the export of {model} on {mesh}"
        named = json.loads((folder / "config.json").read_text())["architectures"]
        expected = [bench.reference(model).architecture]
        assert named == expected, (
            f"{what} names architectures {named}, and not {expected}: architecture must return the name of "
            "transformers' class, by which engines build the model."
        )
        found, original = (GenerationConfig.from_pretrained(at) for at in (folder, bench.model_folder(model)))
        assert _plain(found) == _plain(original), (
            f"{what} has the generation_config.json {_plain(found)} instead of {_plain(original)}: the network must "
            "keep the folder's as generation_config."
        )
        options: dict[str, Any] = {"attn_implementation": "eager", "output_loading_info": True}
        opened, info = pretrained(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32, **options)
        problems = {name: sorted(map(str, problem)) for name, problem in info.items() if problem}
        assert not problems, f"{what} does not fit transformers' model: {problems}. {ADVICE}"
        ends = opened.get_input_embeddings().weight, opened.get_output_embeddings().weight
        is_tied = bench.models[model].tie_word_embeddings
        assert (ends[0] is ends[1]) == is_tied, (
            f"{what} has embeddings that are {'not ' * is_tied}tied: the network's config must be the folder's."
        )
        with torch.no_grad():
            difference = float((reference_logprobs(opened) - step["logprobs"]).abs().max())
        assert difference <= self.tolerance, (
            f"transformers computes other logprobs from {what} than the trainer did, by up to {difference:.3g} nats: "
            f"the folder's configuration or weights are not those of the network. {ADVICE}"
        )

    def test_resume_repeats_the_next_step(self, bench: TrainerBench, model: str, mesh: str) -> None:
        steps = bench.value(model, mesh, "resume")
        advice = (
            "they must be equal bit for bit. A checkpoint holds the network's state_dict and the optimizer: what the "
            "network changes as it trains must be a parameter or a persistent buffer, and load_weights must give "
            "everything else the same value each time."
        )
        what = f"weights of {model} on {mesh}, one step after a checkpoint and the same step resumed from it,"
        assert_equal(dict(steps["resumed"]), dict(steps["went on"]), what, advice)


class ProcessChecks(TrainerChecks):
    """The last check: what any call until then has changed."""

    def test_the_process_is_left_as_it_was(self, bench: TrainerBench, model: str, mesh: str) -> None:
        """Of each rank, and the model's folder, by no call of any check."""
        changes = bench.value(model, mesh, "changes")
        assert not changes, (
            f"{'; '.join(changes)}. All plugins share the process, and others read the folder: pass options to the "
            "calls that need them, and write into the folders that an export and a checkpoint are given."
        )


def assert_once(sent: list[tuple[str, Tensor]], what: str) -> None:
    """Fail where a name comes twice."""
    twice = sorted(name for name, count in Counter(name for name, _ in sent).items() if count > 1)
    assert not twice, f"{what}: {twice[0]!r} comes more than once. {ADVICE}"


def _plain(config: GenerationConfig) -> dict[str, Any]:
    """Return the options that differ from the defaults, without the version of the library that wrote them."""
    options: dict[str, Any] = config.to_diff_dict()
    return {name: options[name] for name in options.keys() - {"transformers_version", "_from_model_config"}}
