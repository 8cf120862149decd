"""The text of single tokens, as bytes: joined, they are the completion, without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the character by which byte-level BPE (GPT-2's ``bytes_to_unicode``) writes each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET: Final = _byte_alphabet()


class TokenPieces:
    """Returns the bytes of tokens, each looked up once.

    Args:
        tokenizer: The run's. Byte-level BPE and SentencePiece with byte fallback are known by their decoder, and give
            every byte; of any other kind a piece is what ``decode`` makes of the token alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._is_byte_level = "ByteLevel" in decoder
        self._is_sentencepiece = "ByteFallback" in decoder or "Metaspace" in decoder
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def of(self, token_ids: Iterable[int]) -> dict[int, bytes]:
        """Return the bytes of each token by its id."""
        wanted = set(token_ids)
        if new := sorted(wanted - self._known.keys()):
            texts = self._tokenizer.convert_ids_to_tokens(new)
            self._known |= {token_id: self._piece(token_id, text) for token_id, text in zip(new, texts, strict=True)}
        return {token_id: self._known[token_id] for token_id in wanted}

    def _piece(self, token_id: int, text: str | None) -> bytes:
        if token_id in self._added:
            return _as_bytes(self._added[token_id])
        if text is None:  # an id beyond the vocabulary, which a padded output layer can have
            return b""
        if self._is_byte_level and all(character in _ALPHABET for character in text):
            return bytes(_ALPHABET[character] for character in text)
        if self._is_sentencepiece:
            found = _BYTE.fullmatch(text)
            return bytes([int(found[1], 16)]) if found else _as_bytes(text.replace("\u2581", " "))
        return _as_bytes(self._tokenizer.decode([token_id]))


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="backslashreplace")
