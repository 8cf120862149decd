"""Program that reads a tokenizer's files within limits, before a trainer does. It loads nothing of rlplug::

    python tokenizer_reader.py CPU_S MEMORY_BYTES tokenizer.json [tokenizer_config.json ...]

It prints why they are refused, or nothing.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

MOST_BYTES: Final = 32 << 20
"""Size of a file beside ``tokenizer.json``, which names added tokens at most."""
MOST_ADDED: Final = 200_000
"""Added tokens, for each of which transformers takes up to 70 microseconds; models of speech have 65,536."""
MOST_GROWTH: Final = 512
"""Longest text, or number of tokens, that comes of a text of length 1; of T5's tokenizer it is 72."""
STEPS: Final = ("normalizers", "pretokenizers", "processors", "decoders")
GROWTH: Final = {"BertNormalizer": 3, "ByteLevel": 2, "Metaspace": 2}
"""By how much kinds of steps lengthen a text each time; all others do so once, as Unicode's forms, or never."""
PROBE: Final = f"Who has 3?\n\n{'a' * 2000} {'1' * 500}{' ' * 500}{'(' * 500}é 日本語 {'٣' * 100} \U0001f600\n" * 2


def refusal(tokenizer_json: str, others: list[str]) -> str:
    """Return why a tokenizer is refused; an empty string for one that may be read."""
    for file in others:
        if (size := os.path.getsize(file)) > MOST_BYTES:
            return f"{os.path.basename(file)} has {size >> 20} MiB, and none has more than {MOST_BYTES >> 20}"
        found = json.loads(Path(file).read_bytes())
        if "fast_tokenizer_files" in found:
            return f"{os.path.basename(file)} has fast_tokenizer_files, other files of a tokenizer: remove the key"
        if (last := max(map(int, found.get("added_tokens_decoder") or [0]))) >= 1 << 24:
            return f"{os.path.basename(file)} adds a token with the id {last}"
    tokenizer = Tokenizer.from_file(tokenizer_json)
    if (count := len(tokenizer.get_added_tokens_decoder())) > MOST_ADDED:
        return f"it has {count:,} added tokens, and none has more than {MOST_ADDED:,}"
    growths = [growth(state(getattr(tokenizer, name))) for name in ("normalizer", "pre_tokenizer")]
    for what, most in (
        ("a text", math.prod(growths)),
        ("a list of tokens", growth(state(tokenizer.post_processor))),
        ("a token's text", growth(state(tokenizer.decoder))),
        ("a word", max(len(each) for each in affixes(tokenizer.model))),
    ):
        if most > MOST_GROWTH:
            return f"it may make {what} {most:.3g} times as long, and none does more than {MOST_GROWTH} times"
    tokenizer.no_padding()
    tokenizer.no_truncation()
    try:
        tokenizer.decode(tokenizer.encode(PROBE).ids)
    except BaseException:  # noqa: BLE001 - such as a panic of Rust; of the user's prompts, the one it fails at is named
        return ""
    return ""


def state(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as it was read, which is not always what another reader finds in the file."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def growth(part: dict[str, Any]) -> float:
    """Return by how much a part of a tokenizer makes a text longer at most."""
    if (steps := next((part[name] for name in STEPS if name in part), None)) is not None:
        return math.prod(map(growth, steps))
    kind = part.get("type", "")
    if kind == "Replace":
        replaced, content = part["pattern"].get("String"), len(part["content"])
        return max(1, content / len(replaced)) if replaced else 1 + content  # a regex may match nothing, everywhere
    if kind == "Prepend":
        return 1 + len(part["prepend"])
    if kind == "Precompiled":
        charsmap = base64.b64decode(part["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    if kind == "TemplateProcessing":
        return len(part["single"]) + sum(len(token["ids"]) for token in part["special_tokens"].values())
    return GROWTH.get(kind, 1)


def affixes(model: Any) -> list[str]:
    """Return the texts that a model looks up with each part of a word."""
    return [getattr(model, name, None) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")]


def main() -> None:
    """Print why the files of the command line are refused."""
    cpu_s, memory_bytes, tokenizer_json, *others = sys.argv[1:]
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))  # its signal ends the process, in C code too
    try:
        print(refusal(tokenizer_json, others))
    except MemoryError:
        os.abort()  # as Rust does
    except (AttributeError, KeyError, TypeError):
        print("a value in its files is of another type, or name, than tokenizers have")
    except BaseException as error:  # noqa: BLE001 - files that cannot be read, and panics of Rust
        print(f"{type(error).__name__}: {str(error)[:500]}")


if __name__ == "__main__":
    main()
