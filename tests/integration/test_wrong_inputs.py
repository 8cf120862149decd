"""Wrong files, classes and parts of a run, generated: each ends in one message that names key or file and a remedy."""

from __future__ import annotations

import random
import re

import pytest
from wrong_command_lines import faults

LEGAL = (
    # wrong_inputs
    r"model: \S+ {\"(architectures|transformers_version|pretraining_tp|use_cache|(bos|eos|pad)_token_id)\": .*",
    r"model: \S+ {\"attention_dropout\": .*",  # none is applied
    r"model: \S+ {\"(rope_parameters\": null|max_position_embeddings\": 1000+)}",
    r"model: \S+ {\"(head_dim|num_key_value_heads)\": null}",  # follow from the other sizes
    r"model: \S+ {\"rope_parameters\": {\"a\": 1}}",  # transformers warns, and takes its default
    r"file: (tokenizer_config|generation_config)\.json {}",
    # wrong_structures: keys that may stand at the top, one name in two blocks, and options that are right if unusual
    r"level: (data\.(train|val)|model\.(algorithm|num_steps|rewards|sampling\.max_new_tokens)) as \w+",
    r"level: model\.validation\.every_n_steps as checkpoint\.every_n_steps",
    r"(callbacks|logger|trainer|text|line): .*",
    r"nested: model\.algorithm: (.*{init_args: {}}}|{(GRPO|init_args): {}})",  # an empty block says nothing
    r"nested: (model\.policy: tests/model|data\.train: {class_path: FileSource}|.*PolynomialLR, .*total_iters: 0}})",
    # wrong_prompts
    r"prompts: (answer|prompt|line \d+) of .*",  # what a reward makes of an answer is its own affair
    r"prompts: (BOM|CRLF|CR|JSON BOM|CSV BOM|CSV (CR|NUL|of a long field)|capitals|one row|pretty JSON)",
    r"prompts: (CSV quote inside|CSV empty name|parquet of decimals)",
    r"source: data\.(train|val) answer_key is prompt_key",
    r"prompts: (without a last newline|one prompt many times|array in JSON Lines|\(sparse\))",
    # wrong_habits: what is taken as it was meant, and variables that nothing reads
    r"habit \w+: (optimizer without class_path|rewards is (one block|a function's path)|train is a file's name)",
    r"habit \w+: (arabic digits|seed true|BOM and CRLF|dotted key in a block|Infinity as the answer)",
    r"habit variable: (WORLD_SIZE=abc|LOCAL_RANK alone|TMPDIR not there)",
    # wrong_models: what a trainer of llama does not read, or what other files say too
    r"config: (architectures|dtype|is_(en|de)coder|end token|pad token|unknown key|use_cache|num_labels|torch_dtype).*",
    r"config: (vocabulary far larger|head of 1|layers of true|initializer_range.*|eps of 0|code of its own beside)",
    r"config: rope_scaling of a factor -1",  # of which transformers warns
    r"generation: .*",
    r"tokenizer: (padding|truncation|no decoder|decoder of none|version of none|no added tokens|unknown token of none)",
    r"tokenizer: an id twice",  # the tokenizer writes it for one of both alone
    r"tokenizer config: (class of none|class of its own code|end token (of null|is padding)|added token out of range)",
    r"tokenizer config: (class of text alone|longest|padding side|truncation side|clean_up|additional|add_bos).*",
    r"template: (several|last message alone|attack|random|time)",
    r"model file: (generation_config|tokenizer_config)\.json \((missing|megabytes|BOM)\)",
    r"weights: (right|one more|double|all 0|without a prefix)",
    r"weights: (NaN|all NaN|infinity|huge)",  # refused by what they compute, after the start
    r"config: (sliding_window of (0|text)|attention of none)",  # which nothing reads
)
"""Expressions for faults that change nothing of a run, or of which it tells."""
TABLE = "wrong_inputs.py"
PARTS = {
    "wrong_inputs.py": 2,
    "wrong_structures.py": 6,
    "wrong_prompts.py": 2,
    "wrong_models.py": 2,
    "wrong_habits.py": 1,
}
"""Parts of an hour or less in which a night runs each table."""


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


def test_a_sample_of_the_wrong_structures() -> None:
    """Alone catches a key at another level, a look-alike of one, or a path to no class, that is passed over."""
    seed = str(random.SystemRandom().randrange(1 << 30))
    options = ("--match", "^(level|text|class)", "--share", "0.01", "--seed", seed)
    tried, bad = faults("wrong_structures.py", is_legal, *options, timeout=300)

    assert tried > 0
    assert not bad, "\n".join([f"seed {seed}", *bad])


@pytest.mark.nightly
@pytest.mark.timeout(3660)
@pytest.mark.parametrize(("table", "part"), [(table, part) for table, parts in PARTS.items() for part in range(parts)])
def test_every_wrong_input(table: str, part: int) -> None:
    tried, bad = faults(table, is_legal, "--part", str(part), str(PARTS[table]), timeout=3600)

    assert tried > 100
    assert not bad, "\n".join(bad)
