"""Makes what lies beside this file: a tiny Llama's configuration with a character tokenizer, and the prompts.

The files are committed; run this only to change them: ``python examples/hidden_digit/make_files.py``.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
CHARACTERS = ["<eos>", *"0123456789", *"?+-"]


def make_model(folder: Path) -> None:
    """Write configuration and tokenizer; weights are drawn at random when a run starts."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>").save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=CHARACTERS.index("<eos>"),
        pad_token_id=CHARACTERS.index("<eos>"),
    ).save_pretrained(folder)


def make_prompts() -> None:
    """Write one prompt for each digit; all look the same to the policy."""
    rows = [{"prompt": "?", "answer": str(digit)} for digit in range(10)]
    (HERE / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make_model(HERE / "model")
    make_prompts()
