"""What attention over packed rows would get wrong is refused. That the rest comes out right is in test_forward.py."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from rlplug.errors import ConfigError
from rlplug.models.packing import pack
from rlplug.models.packing_checks import check_long_sequences

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = Phi3Config(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=48,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    initializer_range=0.25,
    max_position_embeddings=64,
    original_max_position_embeddings=16,
    rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
)


def is_refused(config, longest, implementation="packed", sequence_size=1):
    try:
        check_long_sequences(config, implementation, "model.policy", longest, sequence_size)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("longest", [16, 17])
def test_longrope_is_refused_where_a_sequence_would_change_with_its_neighbour(longest, make_batch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LONGROPE, dtype=torch.float32, attn_implementation="packed")
    rows = make_batch([(1, 9), (1, longest - 1)]).flat()
    with torch.no_grad():
        beside = model(**pack(rows).packed.model_inputs()).logits[0, :10]
        alone = model(**pack(rows.select([0])).packed.model_inputs()).logits[0]
    changes = not torch.allclose(beside, alone, rtol=0, atol=1e-4)
    assert is_refused(LONGROPE, longest) is changes is (longest > 16)


@pytest.mark.parametrize("config", [LlamaConfig(), GPT2Config(), Gemma3TextConfig()])
def test_other_positions_have_no_such_limit(config):
    assert not is_refused(config, 100_000)


def test_ranks_share_rows_with_packed_attention_alone():
    assert not is_refused(LlamaConfig(), 100, sequence_size=2)
    assert not is_refused(LlamaConfig(), 100, "flash_attention_2")
    with pytest.raises(
        ConfigError,
        match=r"sequence is 2 and model\.policy\.attn_implementation 'flash_attention_2'.*set it to",
    ):
        check_long_sequences(LlamaConfig(), "flash_attention_2", "model.policy", 100, 2)
