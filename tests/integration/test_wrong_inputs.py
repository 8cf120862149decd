"""Wrong files, classes and parts of a run, generated: each ends in one message that names key or file and a remedy."""

from __future__ import annotations

import random
import re

import pytest
from wrong_command_lines import faults

LEGAL = (
    r"model: \S+ {\"(architectures|transformers_version|pretraining_tp|use_cache|(bos|eos|pad)_token_id)\": .*",
    r"model: \S+ {\"attention_dropout\": .*",  # none is applied
    r"model: \S+ {\"(rope_parameters\": null|max_position_embeddings\": 1000+)}",
    r"model: \S+ {\"(head_dim|num_key_value_heads)\": null}",  # follow from the other sizes
    r"model: \S+ {\"rope_parameters\": {\"a\": 1}}",  # transformers warns, and takes its default
    r"file: (tokenizer_config|generation_config)\.json {}",
)
"""Expressions for faults that change nothing of a run."""
TABLE = "wrong_inputs.py"


def is_legal(case: str) -> bool:
    return any(re.fullmatch(legal, case) for legal in LEGAL)


def test_a_fifth_of_the_wrong_inputs_of_parsing() -> None:
    """Alone catches a name, a misspelt key or a module that ends the process in another message, or in none.

    The sample changes from run to run.
    """
    seed = str(random.SystemRandom().randrange(1 << 30))
    kinds = "^(misspelt|module|name|nothing)"
    tried, bad = faults(TABLE, is_legal, "--match", kinds, "--share", "0.1", "--seed", seed, timeout=300)

    assert tried > 5
    assert not bad, "\n".join([f"seed {seed}", *bad])


@pytest.mark.nightly
@pytest.mark.timeout(1860)
@pytest.mark.parametrize("part", range(2))
def test_every_wrong_input(part: int) -> None:
    tried, bad = faults(TABLE, is_legal, "--part", str(part), "2", timeout=1800)

    assert tried > 200
    assert not bad, "\n".join(bad)
