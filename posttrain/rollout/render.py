"""Tasks and conversations to token ids, under a model's chat template.

What the policy sampled is never tokenised again. Between two turns of an append-only template
only the *suffix* is encoded: the text the template adds behind a placeholder turn.

    ids of a row:  opening │ sampled │ suffix │ sampled │ suffix │ …
    mask:             0    │    1    │    0   │    1    │    0   │

    opening   everything up to the assistant turn, and the task's given prefix
    sampled   with the end token, unless the turn was cut
    suffix    from behind the end token (from the end token on, where the turn was cut) over the
              observations to the next assistant turn

Under a template that rewrites history each turn has a row of its own: the whole prompt, rendered
anew, and what was sampled. A template without a system role gets the constraints at the head of
the user message; one without a tool role gets all observations of a turn as one user message. The
one thing that must stay true: a special token in the ids was written by the template or sampled,
never spelt by a task or a tool; and there is exactly one BOS where the model has one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from posttrain.core.task import Description, Message, Role, Task, Tool
from posttrain.core.trajectory import Turn
from posttrain.rollout import tools as tool_calls
from posttrain.rollout.template import ChatMessage, History, TemplateProfile, probe
from posttrain.rollout.text import PLACEHOLDER
from posttrain.rollout.tokenizer import Guard, TransformersTokenizer
from posttrain.rollout.tools import CallFormat


class Renderer:
    """Renders for one tokenizer; stateless apart from a cache of encoded openings.

    Raises:
        UsageError: the tokenizer's chat template cannot be used (see `template.probe`).
    """

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self.profile: TemplateProfile = probe(tokenizer)
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._start = functools.lru_cache(maxsize=256)(self._encode_start)

    @property
    def appends(self) -> bool:
        """Whether an attempt is one row."""
        return self.profile.history is History.APPEND_ONLY

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which sampling a turn stops."""
        return self.profile.stop_ids

    def call_format(self, tools: Sequence[Tool]) -> CallFormat:
        """How a task's tools are called."""
        return tool_calls.format_for(tools, hermes=self.profile.hermes_calls)

    def messages(self, task: Task) -> tuple[Message, ...]:
        """The task as the policy reads it: constraints as system, objective as user message."""
        description = task.description
        rules = self._rules(description)
        objective = Message.of(Role.USER, description.objective)
        if not rules:
            return (objective,)
        if self.profile.system_role:
            return (Message.of(Role.SYSTEM, rules), objective)
        return (Message.of(Role.USER, f"{rules}\n\n{description.objective}"),)

    def prompt(self, task: Task, turns: Sequence[Turn] = ()) -> tuple[int, ...]:
        """Ids of the whole prompt for the turn after `turns`; the opening where there are none.

        The first assistant turn starts with the task's prefix.
        """
        talk = self._opening_messages(task)
        for number, turn in enumerate(turns):
            given = task.prefix if number == 0 else ""
            reply = self._guard.apply_to_reply(given + turn.text)
            talk += [{"role": "assistant", "content": reply}, *self._observations(turn)]
        text = self._apply(task, talk)
        if not turns:
            return self._start(text + self._guard.apply(task.prefix))
        return self._encode_start(text)

    def suffix(self, task: Task, turn: Turn, *, last_id: int | None) -> tuple[int, ...]:
        """Ids between a turn that was sampled and the next one (append-only templates).

        `last_id` is the last sampled id: the suffix starts behind the end token if that was it,
        and otherwise closes the turn first.
        """
        reply = {"role": "assistant", "content": PLACEHOLDER}
        talk = [*self._opening_messages(task), reply, *self._observations(turn)]
        added = self._apply(task, talk).rpartition(PLACEHOLDER)[2]
        ids = self._guard.encode(added, inside=True)
        end_id = self.profile.end_id
        closed = last_id == end_id and end_id in ids
        return ids[ids.index(end_id) + 1 :] if closed else ids

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """Ids that a policy has to emit to write this text, with the end token."""
        cut = self._guard.apply_to_reply(text)
        return (*self._guard.encode(cut, inside=True), self.profile.end_id)

    def reply_text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without the token that ended the turn; broken UTF-8 as U+FFFD."""
        ended = bool(ids) and ids[-1] in self.profile.stop_ids
        return self._tokenizer.decode(ids[:-1] if ended else ids)

    def raw(self, text: str) -> tuple[int, ...]:
        """Ids of a plain or already rendered prompt, special tokens recognised, one BOS."""
        return self._with_leading(self._tokenizer.encode(text))

    def _rules(self, description: Description) -> str:
        """Constraints, verification and tools, as short as they can be."""
        listed = bool(description.tools) and not self.profile.hermes_calls
        constraints = description.constraints
        if len(constraints) == 1 and not description.verification and not listed:
            return constraints[0]
        parts = []
        if constraints:
            parts.append("\n".join(["Constraints:", *(f"- {line}" for line in constraints)]))
        if description.verification:
            parts.append(f"Verification: {description.verification}")
        if listed:
            form = self.call_format(description.tools)
            parts.append("Tools:\n" + tool_calls.describe(description.tools, form))
        return "\n".join(parts)

    def _opening_messages(self, task: Task) -> list[ChatMessage]:
        return [
            {"role": message.role.value, "content": self._guard.apply(message.text)}
            for message in self.messages(task)
        ]

    def _observations(self, turn: Turn) -> list[ChatMessage]:
        texts = [self._guard.apply(text) for text in turn.observations]
        if not self.profile.tool_role:
            return [{"role": "user", "content": "\n".join(texts)}]
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            for call, text in zip(turn.tool_calls, texts, strict=True)
        ]

    def _apply(self, task: Task, talk: Sequence[ChatMessage]) -> str:
        listed = task.description.tools if self.profile.hermes_calls else ()
        return self._tokenizer.apply(
            talk, tools=[tool_calls.schema(tool) for tool in listed], add_generation_prompt=True
        )

    def _encode_start(self, text: str) -> tuple[int, ...]:
        return self._with_leading(self._guard.encode(text, inside=False))

    def _with_leading(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        leading = self._tokenizer.leading_id
        return ids if leading is None or ids[:1] == (leading,) else (leading, *ids)
