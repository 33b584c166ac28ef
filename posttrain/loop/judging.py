"""The judge that a configuration names, for whoever verifies: runs, examinations, looking back."""

from __future__ import annotations

from contextlib import AsyncExitStack

from posttrain.core.ports import Chat, Clock
from posttrain.loop.settings import JudgeSettings
from posttrain.verify.endpoint import EndpointChat


async def open_judge(stack: AsyncExitStack, settings: JudgeSettings, clock: Clock) -> Chat | None:
    """A chat with the judge, closed with the stack; None where there is none.

    Raises:
        PreflightError: its key is not set.
    """
    if not settings.url:
        return None
    chat = EndpointChat(
        settings.url,
        settings.model,
        clock,
        key_variable=settings.key_variable,
        timeout_s=settings.timeout_s,
    )
    stack.push_async_callback(chat.close)
    return chat
