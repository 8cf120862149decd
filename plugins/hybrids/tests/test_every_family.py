"""Every causal model type of transformers, tiny: trained right, or refused at start with a reason; see docs/api."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_trials import KEY, Trial, tried
from tiny_families import families, tiny, variants

PUSHED = ("falcon_h1", "gemma4_text", "phimoe", "whisper", "llama")
"""Buffers of the whole model, options for each layer, noise that evaluation reads, no ``logits_to_keep``, and none."""


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
