"""What a chat template does, found out by probing it once at load.

Three questions: does what it renders for k turns begin what it renders for k+1 (append-only, or
does it rewrite history); which roles does it lack; how does it write tool calls. The one thing
that must stay true: every answer comes from rendering, none from a model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from posttrain.core.errors import UsageError
from posttrain.core.task import Json
from posttrain.rollout.text import PLACEHOLDER
from posttrain.rollout.tokenizer import TransformersTokenizer

ChatMessage = Mapping[str, Json]

_REPLIES = (("first reply", "second reply"), ("<think>\nweigh\n</think>\n\nfirst", "second"))
_TOOL_NAME = "probe_tool"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class History(StrEnum):
    """What a template does to earlier turns."""

    APPEND_ONLY = "append-only"
    """The next prompt starts with everything so far: one row an attempt."""
    REWRITTEN = "rewrites-history"
    """Earlier turns are rendered differently later on: each turn is its own row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """The class of a chat template; belongs in a run's record."""

    history: History
    system_role: bool
    """False: constraints are merged into the user message."""
    tool_role: bool
    """False: observations are sent as user messages."""
    hermes_calls: bool
    """True: the template lists tools itself and writes `<tool_call>{json}</tool_call>`."""
    end_id: int
    """The token that ends an assistant turn."""
    stop_ids: tuple[int, ...]
    """Tokens at which sampling a turn stops: `end_id`, and the end of sequence where it differs."""


def probe(tokenizer: TransformersTokenizer) -> TemplateProfile:
    """Render a few conversations and look.

    Raises:
        UsageError: the template cannot render a conversation of user and assistant, or nothing
            ends an assistant turn.
    """
    system_role = _shows(tokenizer, _messages(("system", "be brief"), ("user", "a question")))
    roles = ("system", "user") if system_role else ("user",)
    start = _messages(*((role, f"opening of {role}") for role in roles))
    tool_role = _knows_tool_role(tokenizer, start)
    observer = "tool" if tool_role else "user"
    _refuse_unusable(tokenizer, start)
    end_id = _end_id(tokenizer, start)
    eos = () if tokenizer.eos_id in (None, end_id) else (tokenizer.eos_id,)
    appends = all(_appends(tokenizer, start, observer, replies) for replies in _REPLIES)
    return TemplateProfile(
        history=History.APPEND_ONLY if appends else History.REWRITTEN,
        system_role=system_role,
        tool_role=tool_role,
        hermes_calls=_writes_hermes(tokenizer, start),
        end_id=end_id,
        stop_ids=(end_id, *(index for index in eos if index is not None)),
    )


def _messages(*pairs: tuple[str, str]) -> list[ChatMessage]:
    return [{"role": role, "content": content} for role, content in pairs]


def _rendered(
    tokenizer: TransformersTokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[ChatMessage] = (),
) -> str | None:
    """The prompt for the next assistant turn, or None where the template refuses."""
    try:
        return tokenizer.apply(messages, tools=tools, add_generation_prompt=True)
    except UsageError:
        return None


def _shows(tokenizer: TransformersTokenizer, messages: Sequence[ChatMessage]) -> bool:
    """Whether every message's content is there once, in order."""
    text = _rendered(tokenizer, messages)
    if text is None:
        return False
    places = [text.find(message["content"]) for message in messages]
    once = all(text.count(message["content"]) == 1 for message in messages)
    return once and places == sorted(places)


def _knows_tool_role(tokenizer: TransformersTokenizer, start: Sequence[ChatMessage]) -> bool:
    """Whether tool results have a form of their own; a template that would name *any* role in the
    same way knows nothing of tools, and its model has never seen that name.
    """
    before = [*start, *_messages(("assistant", "a reply"))]
    as_tool = [*before, *_messages(("tool", "an outcome"))]
    if not _shows(tokenizer, as_tool):
        return False
    made_up = _rendered(tokenizer, [*before, *_messages(("zebra", "an outcome"))])
    return made_up is None or made_up != (_rendered(tokenizer, as_tool) or "").replace(
        "tool", "zebra"
    )


def _refuse_unusable(tokenizer: TransformersTokenizer, start: Sequence[ChatMessage]) -> None:
    talk = [*start, *_messages(("assistant", PLACEHOLDER), ("user", "and then"))]
    text = tokenizer.apply(talk, add_generation_prompt=True)
    if text.count(PLACEHOLDER) != 1:
        raise UsageError(
            f"the chat template shows an assistant turn {text.count(PLACEHOLDER)} times, not once.",
            "set a chat template on the tokenizer that renders every turn",
        )


def _end_id(tokenizer: TransformersTokenizer, start: Sequence[ChatMessage]) -> int:
    """The first special token behind an assistant turn, else the end of sequence."""
    talk = [*start, *_messages(("assistant", PLACEHOLDER))]
    text = tokenizer.apply(talk, add_generation_prompt=False)
    special = {tokenizer.added[token] for token in tokenizer.special}
    for index in tokenizer.encode_inside(text.rpartition(PLACEHOLDER)[2]):
        if index in special:
            return index
    if tokenizer.eos_id is None:
        raise UsageError(
            "nothing ends an assistant turn: the chat template writes no special token after it "
            "and the tokenizer names no end of sequence.",
            "set eos_token on the tokenizer",
        )
    return tokenizer.eos_id


def _appends(
    tokenizer: TransformersTokenizer,
    start: Sequence[ChatMessage],
    observer: str,
    replies: tuple[str, str],
) -> bool:
    """Whether each prompt begins with the one before and the reply to it."""
    talk, text = list(start), _rendered(tokenizer, start)
    for turn, reply in enumerate(replies):
        talk = [*talk, *_messages(("assistant", reply), (observer, f"outcome {turn}"))]
        longer = _rendered(tokenizer, talk)
        if text is None or longer is None or not longer.startswith(text + reply):
            return False
        text = longer
    return True


def _writes_hermes(tokenizer: TransformersTokenizer, start: Sequence[ChatMessage]) -> bool:
    text = _rendered(tokenizer, start, tools=[_TOOL])
    return text is not None and _TOOL_NAME in text and "<tool_call>" in text
