"""A chat over HTTP: any server that speaks the OpenAI-compatible `chat/completions`.

Not a client of ours for models in training (`engine`): judges and other outside voices. The one
thing that must stay true: what the server cannot or will not say is an InfraError, never a reply.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import httpx2

from posttrain.core.errors import InfraError, PreflightError
from posttrain.core.ports import Clock
from posttrain.core.task import Message, Role

TRIES = 3
PAUSE_S = 1.0
"""Pause before the second try; it doubles."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Answers after which another try may succeed."""


class EndpointChat:
    """`core.ports.Chat` over a server. `key_variable` names the environment variable with the key.

    Raises:
        PreflightError: that variable is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        clock: Clock,
        *,
        key_variable: str = "",
        timeout_s: float = 60.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {}
        if key_variable:
            if not (key := os.environ.get(key_variable)):
                raise PreflightError(f"the judge's key is not set: {key_variable} is empty.",
                                     f"export {key_variable}=…")  # fmt: skip
            headers["Authorization"] = f"Bearer {key}"
        self._url, self._model, self._clock = f"{url.rstrip('/')}/chat/completions", model, clock
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout_s, transport=transport)

    async def reply(self, messages: Sequence[Message], *, max_tokens: int) -> Message:
        """The first choice's text, at temperature 0.

        Raises:
            InfraError: no server, no success after three tries, or no text in what it said.
        """
        body = {
            "model": self._model,
            "messages": [{"role": m.role.value, "content": m.text} for m in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return Message.of(Role.ASSISTANT, _text(await self._asked(body)))

    async def close(self) -> None:
        """Let the connections go."""
        await self._client.aclose()

    async def _asked(self, body: dict[str, Any]) -> httpx2.Response:
        why = ""
        for number in range(TRIES):
            if number:
                await self._clock.sleep(PAUSE_S * 2.0 ** (number - 1))
            try:
                answer = await self._client.post(self._url, json=body)
            except (TimeoutError, httpx2.HTTPError) as error:
                why = f"{type(error).__name__} {error}"
                continue
            if answer.status_code == httpx2.codes.OK:
                return answer
            why = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in PASSING:
                break
        raise InfraError(
            f"the judge's endpoint {self._url} gave no answer: {why}",
            "look whether it is up, and whether judge.model is one it has",
        )


def _text(answer: httpx2.Response) -> str:
    try:
        text = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise InfraError(f"no chat completion but {answer.text[:200]!r}.") from error
    if not isinstance(text, str):
        raise InfraError(f"wanted text from the judge's endpoint, got {text!r:.80}.")
    return text
