"""What an attempt hands in to be looked at as text: its reply, or a file that it left.

It judges nothing. The one thing that must stay true: where there is no text the attempt gave none,
while a workspace that cannot be read is an error.
"""

from __future__ import annotations

from posttrain.core.errors import UsageError, VerifierError
from posttrain.core.task import Check
from posttrain.verify import answers, documents
from posttrain.verify.answers import Where
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, text_of

MAX_FILE_BYTES = 8 << 20
PLACES = ("reply", "block")


async def submitted(check: Check, subject: Subject, *languages: str) -> str:
    """The text of the declared file `path`, or the reply after the task's prefix, or with `where` =
    block the content of the reply's only fenced block, which names one of the languages or none.

    Raises:
        UsageError: both `path` and `where`, or an unknown one.
        Unreadable: there is none.
    """
    where = check.params.get("where", "reply")
    if "path" not in check.params:
        if where not in PLACES:
            raise UsageError(
                f"check {check.kind!r} has no 'where' {where!r:.80}.", f"name one of {PLACES}"
            )
        told = answers.extract(subject.reply, prefix=subject.task.prefix, where=Where.REPLY)
        if told.text is None:
            raise Unreadable(told.refusal)
        return documents.block(told.text, *languages) if where == "block" else told.text
    if "where" in check.params:
        raise UsageError(f"check {check.kind!r} has both 'path' and 'where'.", "keep one of them")
    if subject.sealed is None:
        raise VerifierError("the attempt left no sealed file system to look at.")
    data = await subject.sealed.read(text_of(check, "path"), max_bytes=MAX_FILE_BYTES + 1)
    if data is None or len(data) > MAX_FILE_BYTES:
        raise Unreadable(f"no regular file of at most {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Unreadable("no UTF-8 text") from None
