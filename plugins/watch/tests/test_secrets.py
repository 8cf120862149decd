"""Secrets of a configuration reach no logger and no report, and the rest of it is as it was."""

from __future__ import annotations

import pytest
import yaml
from rlplug_watch.secrets import mask_secrets, mask_text, mask_yaml

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    "name", ["api_key", "OPENAI_API_KEY", "password", "hf_token", "token", "client_secret", "auth-token", "private_key"]
)
def test_text_under_the_name_of_a_secret_is_masked(name: str) -> None:
    masked = mask_secrets({"a": [{"b": {name: SECRET, "beside": "kept"}}], name: 1234})
    assert SECRET not in str(masked)
    assert masked == {"a": [{"b": {name: "***", "beside": "kept"}}], name: "***"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:pw@db.example/x", "postgresql://***@db.example/x"),
        ("https://token@host/a?b=c", "https://***@host/a?b=c"),
        ("https://host/a?b=c&api_key=1234&d=e#f", "https://host/a?b=c&api_key=***&d=e#f"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("export HF=hf_AbCdEfGhIjKlMnOpQr", "export HF=***"),
        ("ghp_0123456789abcdefghij", "***"),
    ],
)
def test_secrets_inside_text_are_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert mask_secrets({"url": [text]}) == {"url": [masked]}


def test_what_is_no_secret_stays() -> None:
    """Catches a rule that is too wide: a configuration that cannot be read is of no use in a logger."""
    config = {
        "api_key_env": "VLLM_API_KEY",
        "max_new_tokens": 4,
        "eos_token": "</s>",
        "pad_token_id": 0,
        "token": "",
        "password": None,
        "urls": ["http://10.0.0.7:8000", "https://host/a?page=2"],
        "path": "me@host:/models/hf_hub",
        "reward": "examples.quickstart.reward.digits_in_place",
    }
    assert mask_secrets(config) == config
    text = yaml.safe_dump(config) + "# a comment\n"
    assert mask_yaml(text) == text


def test_yaml_is_masked_and_stays_yaml() -> None:
    text = f"model:\n  api_key: {SECRET}\n  prompt: |\n    two\n    lines\n"
    assert yaml.safe_load(mask_yaml(text)) == {"model": {"api_key": "***", "prompt": "two\nlines\n"}}
    assert SECRET not in mask_yaml(text)
    assert "pw" not in mask_yaml("{ broken: http://me:pw@host")
