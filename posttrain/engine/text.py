"""Bytes of tokens to text, piece by piece, and stop strings across token borders.

Not a tokenizer: it is handed a function from a token id to its bytes (`token_bytes` makes one from
a tokenizer). The one thing that must stay true: the joined pieces equal the text of the joined
bytes, whatever the borders between tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any

TokenBytes = Callable[[int], bytes]


class Detokenizer:
    """Incremental, UTF-8-safe text of one token stream.

    >>> pieces = ["😀".encode()[:2], "😀".encode()[2:], "é".encode()[:1], "é".encode()[1:]]
    >>> text = Detokenizer(pieces.__getitem__)
    >>> [text.push(i) for i in range(4)], text.flush()
    (['', '😀', '', 'é'], '')
    """

    def __init__(self, to_bytes: TokenBytes) -> None:
        self._to_bytes = to_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that became complete with this token; '' while a character is still open."""
        return self._decoder.decode(self._to_bytes(token))

    def flush(self) -> str:
        """What an unfinished character leaves: one U+FFFD, or ''. Call it once, at the end."""
        return self._decoder.decode(b"", final=True)


class StopWatch:
    """Says when one of some strings has appeared in a stream of pieces.

    >>> watch = StopWatch(("###",))
    >>> watch.push("a#"), watch.push("#"), watch.push("#b")
    (False, False, True)
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string would stop everything"
        self._strings = tuple(strings)
        self._keep = max(map(len, strings), default=1) - 1
        self._tail = ""

    def push(self, piece: str) -> bool:
        """True if a stop string is complete now, with this piece."""
        seen = self._tail + piece
        self._tail = seen[-self._keep :] if self._keep else ""
        return any(string in seen for string in self._strings)


def token_bytes(tokenizer: Any) -> TokenBytes:
    """The bytes of each id of a transformers tokenizer: byte-level BPE, or pieces with `▁` for a
    space and `<0x0A>` for single bytes. Special tokens and unknown ids have none.
    """
    special = set(tokenizer.all_special_ids)
    table: dict[int, bytes] = {}
    byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)

    def to_bytes(token: int) -> bytes:
        if token not in table:
            piece = None if token in special else tokenizer.convert_ids_to_tokens(token)
            table[token] = _piece_bytes(piece or "", byte_level=byte_level)
        return table[token]

    return to_bytes


def _piece_bytes(piece: str, *, byte_level: bool) -> bytes:
    if byte_level and BYTE_OF.keys() >= set(piece):
        return bytes(BYTE_OF[char] for char in piece)
    if byte_level:  # an added token that is plain text
        return piece.encode()
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(match[1])
    return piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Character of the byte-level alphabet → byte (as GPT-2 defined it: printable Latin-1
    characters stand for themselves, the other bytes for U+0100 onwards in order).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


BYTE_OF = _byte_alphabet()
