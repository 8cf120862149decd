"""Every causal model type of transformers, tiny: trained right, or refused at start with a reason; see docs/api."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_trials import KEY, LENGTHS, ONE, Trial, alone_logprobs, tried
from hybrid_models import HAS_WRAPPERS, enlarge
from rlplug_hybrids import PaddedTrainer
from tiny_families import families, tiny, variants
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError
from rlplug.interfaces import ModelConfig
from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.models.loading import to_empty_on
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Request, SamplingParams
from rlplug.weight_sync.hf_names import hf_views

PUSHED = ("falcon_h1", "gemma4_text", "phimoe", "llama")
"""Buffers of the whole model, options for each layer, noise that evaluation reads, and none."""
PADDED = ("bloom", "mamba2", "whisper", "llama4_text", "deepseek_v32", "xlstm")
"""Biases of scores, states in a model that drops the borders, no ``logits_to_keep``, chunks of attention, an indexer of
keys, and an option of an engine's chunks alone."""
LATER = pytest.mark.skipif(not HAS_WRAPPERS, reason="this transformers lacks the model type, or its faults are others")
ODDLY_BUILT = ("git", "diffllama", "qwen4_exp_text")
"""A table of attentions, weights that are drawn on the CPU, and divisors in saved buffers of integers."""
UNMASKED = ("bart", "rwkv", "llama")
"""Positions and states that padding on the left moves, and neither."""

DECODER: dict[str, Any] = {"is_decoder": True}
"""Options of a decoder of RoBERTa's kind, whose positions do not begin at 0."""


def each() -> list[object]:
    return [pytest.param(f, marks=() if f in PUSHED else pytest.mark.nightly) for f in families()]


def checked(trial: Trial) -> None:
    assert trial.outcome != "wrong", trial.reason
    if trial.outcome == "refused":
        assert trial.reason.startswith(KEY), trial.reason
        assert len(trial.reason) > len(KEY) + 20


@pytest.mark.parametrize("family", each())
def test_a_model_type_trains_right_or_is_refused_at_start(family: str, tmp_path: Path) -> None:
    """Catches a model type that trains wrongly or ends later than at the start, by an option of its own."""
    try:
        config = tiny(family)
    except Exception as error:  # noqa: BLE001 - transformers refuses its own defaults
        pytest.skip(f"not built: {error}")
    checked(tried(config, tmp_path))


@pytest.mark.parametrize("family", [pytest.param(f, marks=LATER if f.startswith("qwen4") else ()) for f in ODDLY_BUILT])
def test_a_model_that_is_built_oddly_trains_right(family: str, tmp_path: Path) -> None:
    """Catches refusals that are of the check's or the build's making, and not of the model's."""
    trial = tried(tiny(family), tmp_path)
    assert trial.outcome == "right", trial.reason


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(pytest.param(family, {}, marks=LATER if family == "deepseek_v32" else ()) for family in PADDED),
        ("roberta", DECODER),
    ],
)
def test_a_model_that_cannot_be_packed_trains_on_padded_rows(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Catches a refusal of what padded rows train, and rows that another one's tokens change."""
    trial = tried(tiny(family, **options), tmp_path)
    assert (trial.outcome, trial.trainer) == ("right", "PaddedTrainer"), trial.reason


@pytest.mark.parametrize("family", UNMASKED)
def test_a_prompt_gets_the_same_beside_a_long_one_and_one_of_its_length(family: str, tmp_path: Path) -> None:
    """Catches padding of transformers' engine that positions or states read, which ends a run at its first rollout.

    RWKV's states in transformers mix the rows of a batch of equal lengths too.
    """
    config = tiny(family)
    torch.manual_seed(0)
    policy: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    enlarge(policy)
    config.save_pretrained(tmp_path)
    engine = HFRollout()
    engine.start(PolicySpec(str(tmp_path), torch.float32, (1,), 0, 64), Placement(torch.device("cpu"), 0, 1))
    engine.update_weights([list(hf_views(policy).items())], 0)
    assert bool(engine.advice()) == (family == "rwkv")
    prompts = [torch.arange(first, first + length) for first in (3, 4) for length in LENGTHS]
    requests = [Request(str(index), tuple(ids.tolist()), index) for index, ids in enumerate(prompts)]
    for ids, completion in zip(prompts, engine.generate(requests, SamplingParams(5)), strict=True):
        with torch.no_grad():
            alone = alone_logprobs(policy, torch.cat([ids, torch.tensor(completion.token_ids).long()]))
        torch.testing.assert_close(torch.tensor(completion.logprobs), alone[len(ids) - 1 :], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bert", "is not causal"),
        pytest.param("doge", "of it alone", marks=LATER),
        ("prophetnet", "predicts several tokens from each place"),
        ("xlnet", "is not causal"),
    ],
)
def test_padded_rows_of_a_model_that_reads_them_whole_are_refused(family: str, reason: str, tmp_path: Path) -> None:
    """Catches encoders that each row alone shows as right, and reasons in words of torch or of another fault."""
    tiny(family).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.path: \w+ .*{reason}.* Use another model\.$"):
        PaddedTrainer().check(ModelConfig(str(tmp_path), dtype="float32"), KEY, ONE)


def test_a_critic_has_the_states_of_each_row_alone(tmp_path: Path) -> None:
    """Catches a trunk that gives a critic padded rows, since no output layer packs them."""
    config = tiny("bloom")
    config.save_pretrained(tmp_path)
    own = ModelConfig(str(tmp_path), init="random", dtype="float32")
    trainer = PaddedTrainer()
    trunk: Any = trainer.empty_trunk(own, KEY)
    to_empty_on(trunk, torch.device("cpu"))
    trainer.load_weights(trunk, own, KEY)
    rows = [torch.arange(3, 3 + length) for length in LENGTHS]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    with torch.no_grad():
        ids = torch.cat(rows)[None]
        states = trunk(input_ids=ids, cu_seq_lens_q=borders, max_length_q=max(LENGTHS)).last_hidden_state[0]
        alone = torch.cat([trunk(input_ids=row[None]).last_hidden_state[0] for row in rows])
    assert states.std() > 0
    torch.testing.assert_close(states, alone, rtol=0, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("family", families())
def test_variants_train_right_or_are_refused_at_start(family: str, tmp_path: Path) -> None:
    """Catches an option under which a model type that is right trains wrongly."""
    try:
        changes = list(variants(tiny(family)))
    except Exception as error:  # noqa: BLE001 - transformers refuses its own defaults
        pytest.skip(f"not built: {error}")
    for index, change in enumerate(changes):
        try:
            config = tiny(family, **change)
        except Exception:  # noqa: BLE001 - the option does not go with the others
            continue
        checked(tried(config, tmp_path / str(index)))


def test_nearly_all_model_types_have_a_tiny_configuration() -> None:
    """Catches sizes that no longer fit transformers, with which model types would be skipped in silence."""
    built = 0
    for family in families():
        try:
            tiny(family)
        except Exception:  # noqa: BLE001 - transformers refuses its own defaults
            continue
        built += 1
    assert built > 0.9 * len(families())
