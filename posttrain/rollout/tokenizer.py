"""What rendering needs of transformers' fast tokenizers.

Not a chat template's logic (`template`, `render`). The one thing that must stay true: nothing
here ever adds a token that the text does not hold, and text that passed through `Guard` never
becomes a special token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from posttrain.core.errors import UsageError
from posttrain.core.task import Json
from posttrain.rollout.text import CUT, clean


class TransformersTokenizer:
    """A `transformers.PreTrainedTokenizerFast`: text to ids and back, the chat template as text.

    It encodes with a copy of the tokenizer's backend that neither truncates nor pads, so that
    other users of the same object cannot change what is rendered.

    Raises:
        UsageError: it is no fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UsageError(
                f"wanted a fast tokenizer of transformers, got {type(tokenizer).__name__}.",
                "convert the model's tokenizer to tokenizer.json",
            )
        self._tokenizer = tokenizer
        self._backend = type(tokenizer.backend_tokenizer).from_str(
            tokenizer.backend_tokenizer.to_str()
        )
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        tokens = tokenizer.added_tokens_decoder
        self.added: Mapping[str, int] = {token.content: index for index, token in tokens.items()}
        """Text → id of every added token, special or not."""
        self.special = frozenset(token.content for token in tokens.values() if token.special)
        """Texts of the special ones among `added`."""
        self.eos_id: int | None = tokenizer.eos_token_id
        self.leading_id = self._find_leading_id()
        """Id that the tokenizer puts before every text by itself (BOS); None: it puts none."""
        self._anchor = self._find_anchor(tokens.values())

    def _find_leading_id(self) -> int | None:
        leading = self._tokenizer("", add_special_tokens=True)["input_ids"][:1]
        bos_id: int | None = self._tokenizer.bos_token_id
        return bos_id if bos_id is not None and list(leading) == [bos_id] else None

    def _find_anchor(self, tokens: Any) -> str:
        """A special token before which no text is changed; encoding after it is mid-sequence."""
        for token in tokens:
            plain = token.special and not (token.rstrip or token.normalized or token.single_word)
            if plain and len(self.encode(token.content)) == 1:
                return str(token.content)
        return ""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text that starts a sequence; nothing is added, added tokens are recognised."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_inside(self, text: str) -> tuple[int, ...]:
        """Ids of a text that goes on after other text."""
        return self.encode(self._anchor + text)[1:] if self._anchor else self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens as text, broken UTF-8 as U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def apply(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Mapping[str, Json]] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text.

        Raises:
            UsageError: there is no template, or it refuses these messages.
        """
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UsageError(
                f"the chat template refuses the roles {roles}: {error}.",
                "use an instruction-tuned model, or set a chat template on its tokenizer",
            ) from error
        return str(rendered)


class Guard:
    """Keeps text that is not ours from becoming special tokens.

    `apply` puts a cut inside every stretch that spells an added token; `encode` encodes the pieces
    between cuts separately. Text without such stretches is encoded exactly as it would be without
    a guard. Only a token of a single character cannot be kept out.
    """

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self._tokenizer = tokenizer
        self._foreign = _Spelling(
            token for token in tokenizer.added if token in tokenizer.special or _is_mark(token)
        )
        self._own = _Spelling(tokenizer.special)

    def apply(self, text: str) -> str:
        """Text of a task or an observation, cleaned and with cuts.

        Every special token is kept out, and every added one that begins and ends with punctuation:
        many models' turn markers are not declared special.
        """
        return self._foreign.cut(clean(text))

    def apply_to_reply(self, text: str) -> str:
        """Text of the policy's own earlier turns; marks that are not special stay what they are
        (a template may look for them, as for the end of a thought).
        """
        return self._own.cut(clean(text))

    def encode(self, text: str, *, inside: bool) -> tuple[int, ...]:
        """Ids of rendered text; `inside`: it goes on after other text."""
        first, *others = text.split(CUT)
        ids = self._tokenizer.encode_inside(first) if inside else self._tokenizer.encode(first)
        for piece in others:
            ids += self._tokenizer.encode_inside(piece)
        return ids


class _Spelling:
    """Finds every place where a token is spelt out, overlapping ones too."""

    def __init__(self, tokens: Iterable[str]) -> None:
        long = sorted({token for token in tokens if len(token) > 1})
        pattern = "|".join(re.escape(token) for token in long)
        self._pattern = re.compile(f"(?=(?:{pattern}))", re.IGNORECASE) if long else None
        self._beginnings = {
            token[:length].lower() for token in long for length in range(1, len(token))
        }
        self._longest = max(map(len, long), default=0)

    def cut(self, text: str) -> str:
        """The text with a cut behind the first character of every spelt token."""
        if self._pattern is None:
            return text
        starts = [match.start() for match in self._pattern.finditer(text)]
        for start in reversed(starts):
            text = text[: start + 1] + CUT + text[start + 1 :]
        return text + CUT if self._is_unfinished(text) else text

    def _is_unfinished(self, text: str) -> bool:
        """Whether the text ends in the middle of a token that what follows might complete."""
        end = text[-self._longest :].lower()
        starts = (start for start, char in enumerate(end) if char in self._beginnings)
        return any(end[start:] in self._beginnings for start in starts)


def _is_mark(token: str) -> bool:
    """Whether an added token looks like a marker rather than like a word or white space."""
    return not any(char.isalnum() or char.isspace() for char in token[:1] + token[-1:])
