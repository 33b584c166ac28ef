"""The kind `citations`: an answer stands in quoted passages, or follows from numbers in them.

It knows no meaning: that a quotation is to the point is not judged, only that it is one, that every
operand is in it, that the arithmetic gives the answer, and that the answer is right. The one thing
that must stay true: no number enters the arithmetic that is neither quoted nor one of a few
constants, and none that makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import regex

from posttrain.core.errors import UsageError
from posttrain.core.task import Check, Json
from posttrain.verify import answers, documents, segments
from posttrain.verify.arithmetic import Leaf, NoProgram, Number, Program, Row, program
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, Tools, allowed
from posttrain.verify.layers import Finding
from posttrain.verify.submission import submitted

CONSTANTS = (*range(11), -1, 12, 100, 1_000, 1_000_000, 1_000_000_000)
"""Numbers that need not be quoted where a task names no others."""
MAX_CONSTANTS = 4
"""Uses of them in a program."""
MIN_WORDS = 3
"""Of a quotation that is no whole row."""
MAX_QUOTED_CHARS = 2_000
"""Of all quotations together, where a task names no other bound."""
RELATIVE = 1e-3
MAX_REPLY_CHARS = 1 << 16
_SIGNS = str.maketrans("‘’‚‛′“”„‟″‐‑‒–—−|", "'''''\"\"\"\"\"------ ")
_NUMBER = regex.compile(
    r"(?<![\w.,]|\d[.,])(?P<minus>(?<!\w)-\s?)?(?P<open>\(\s*)?[$€£¥]?\s*"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?!\d|[.,]\d)"
    r"(?P<percent>\s?%)?(?P<close>\s*\))?"
)


class _Refused(Exception):
    """What was handed in does not support its answer; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A document: passages, normalised, and for a table its rows by their first cells."""

    passages: tuple[str, ...]
    rows: Mapping[str, tuple[str, Sequence[str]]]
    """First cell → the row's passage and its other cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a task asks of citations."""

    sources: Mapping[str, Source]
    answer: Json
    """None: whatever follows is right."""
    computed: bool
    constants: frozenset[Fraction]
    relative: float
    absolute: float
    max_chars: int


async def citations(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether an answer stands in quoted passages, or follows from numbers that do.

    What is handed in is JSON: `quotes` (a list of `source`, its name, and `text`), `answer`, and,
    unless the task says `computed = false`, `program` (`arithmetic`). Params: `sources` (name →
    text, or a table as a list of rows, each a list of cells), `answer` (gold; without, the check
    must be a gate), `computed`, `constants`, `relative` (1e-3) and `absolute` tolerance,
    `max_chars` of all quotations, `where` (`reply`, or `block`, its only fenced block) or `path`.
    """
    terms = _terms(check)
    try:
        given = await submitted(check, subject, "json")
        if len(given) > MAX_REPLY_CHARS:
            raise _Refused(f"more than {MAX_REPLY_CHARS} characters")
        told = _supported(documents.json_value(given), terms)
    except (Unreadable, NoProgram, _Refused) as error:
        return Finding(value=0.0, evidence={"refused": str(error)})
    return Finding(value=1.0, evidence={"answer": told})


def _terms(check: Check) -> Terms:
    allowed(check, "sources", "answer", "computed", "constants", "relative", "absolute",
            "max_chars", "where", "path")  # fmt: skip
    params = check.params
    if "answer" not in params and not check.gate:
        raise UsageError(
            "check 'citations' without 'answer' pays any answer.",
            "give the gold answer, or make it a gate beside a check of the answer",
        )
    sources, computed = params.get("sources"), params.get("computed", True)
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError(f"check 'citations' wants a table as 'sources', got {sources!r:.80}.")
    constants = params.get("constants", CONSTANTS)
    bounds = [params.get("relative", RELATIVE), params.get("absolute", 0.0)]
    bounds += constants if isinstance(constants, (list, tuple)) else [constants]
    if not all(type(one) in (int, float) and math.isfinite(one) for one in bounds):
        raise UsageError(f"check 'citations' wants tolerances and constants, got {bounds!r:.80}.")
    if not 0 <= bounds[0] < 1 or bounds[1] < 0:
        raise UsageError(f"check 'citations' wants tolerances of 0 or more, got {bounds[:2]}.")
    most, answer = params.get("max_chars", MAX_QUOTED_CHARS), params.get("answer")
    if type(most) is not int or most < 1 or not isinstance(computed, bool):
        raise UsageError("check 'citations' wants a number as 'max_chars', true or false as "
                         f"'computed', got {most!r:.40} and {computed!r:.40}.")  # fmt: skip
    if "answer" in params and (
        isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or answer == ""
    ):
        raise UsageError(
            f"check 'citations' wants text or a number as 'answer', got {answer!r:.80}."
        )
    return Terms(
        sources={str(name): _source(value) for name, value in sources.items()}, answer=answer,
        computed=computed, constants=frozenset(map(Fraction, bounds[2:])), relative=bounds[0],
        absolute=bounds[1], max_chars=most,
    )  # fmt: skip


def _source(value: Json) -> Source:
    if isinstance(value, str):
        return Source(passages=(normalised(value),), rows={})
    if not isinstance(value, (list, tuple)) or not value:
        raise UsageError(f"a source is a text or a list of rows, not {value!r:.80}.")
    passages, rows = [], {}
    for row in value:
        cells = [row] if isinstance(row, str) else row
        if not isinstance(cells, (list, tuple)) or not all(isinstance(c, str) for c in cells):
            raise UsageError(f"a row is a text or a list of texts, not {row!r:.80}.")
        passages.append(normalised(" | ".join(cells)))
        if len(cells) > 1:
            rows[normalised(cells[0])] = (passages[-1], cells[1:])
    return Source(passages=tuple(passages), rows=rows)


def normalised(text: str) -> str:
    r"""Text as quotations are compared: compatibility forms, quotation marks, dashes and white
    space made one; what stands between the cells of a row counts as white space.

    >>> normalised(" “net  sales” – 2012\n| 1\u00a0592 "), normalised("ﬁve")
    ('"net sales" - 2012 1 592', 'five')
    """
    return " ".join(segments.visible(text, "NFKC").translate(_SIGNS).split())


# --- what was handed in ---------------------------------------------------------------------------


def _supported(given: Json, terms: Terms) -> str:
    """The answer, as text.

    Raises:
        _Refused, NoProgram: it does not stand.
    """
    wanted = {"quotes", "answer", *(("program",) if terms.computed else ())}
    if not isinstance(given, Mapping) or set(given) != wanted:
        found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise _Refused(f"wanted an object of {sorted(wanted)}, got {found!r:.200}")
    quotes = _quotes(given["quotes"], terms)
    answer = given["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise _Refused(f"wanted text or a number as answer, got {answer!r:.80}")
    if terms.computed:
        _follows(given["program"], quotes, answer, terms)
    elif not any(_stated(answer, one) for one in quotes):
        raise _Refused(f"the answer {answer!r:.80} stands in no quotation")
    if terms.answer is not None and not _same(terms.answer, answer, terms):
        raise _Refused(f"another answer: {answer!r:.80}")
    return str(answer)


def _quotes(given: Json, terms: Terms) -> list[str]:
    """The quotations, each found in its source."""
    if not isinstance(given, list) or not given:
        raise _Refused("no quotations")
    found = []
    for quote in given:
        if not isinstance(quote, Mapping) or set(quote) != {"source", "text"}:
            raise _Refused(f"wanted 'source' and 'text' of a quotation, got {quote!r:.120}")
        name, text = str(quote["source"]), normalised(str(quote["text"]))
        if name not in terms.sources:
            raise _Refused(f"no source {name!r:.80}")
        passages = terms.sources[name].passages
        if text not in passages and segments.words(text) < MIN_WORDS:
            raise _Refused(f"fewer than {MIN_WORDS} words are quoted: {text!r:.80}")
        if not any(_stands(text, passage) for passage in passages):
            raise _Refused(f"not in {name!r:.80}: {text!r:.120}")
        found.append(text)
    if (size := sum(map(len, found))) > terms.max_chars:
        raise _Refused(f"{size} characters are quoted, at most {terms.max_chars} may be")
    return found


def _stands(text: str, passage: str) -> bool:
    """Whether a text is part of a passage, and not of a longer word or number of it."""
    if not text:
        return False
    begin = passage.find(text)
    while begin >= 0:
        end = begin + len(text)
        before, after = passage[max(0, begin - 2) : begin], passage[end : end + 2]
        cut = regex.match(r"\w", text) and regex.search(r"(?:\w|\d[.,])$", before)
        sign = regex.match(r"\d", text) and regex.search(r"(?:^|\W)-$", before)
        torn = regex.search(r"\w$", text) and regex.match(r"\w|[.,]\d", after)
        if not (cut or sign or torn):
            return True
        begin = passage.find(text, begin + 1)
    return False


def _stated(answer: str | int | float, quote: str) -> bool:
    """Whether an answer stands in a quotation: a number however it is written, a text as it is."""
    if not isinstance(answer, str) and Fraction(str(answer)) in numbers(quote):
        return True
    return _stands(normalised(str(answer)).casefold(), quote.casefold())


def numbers(passage: str) -> set[Fraction]:
    """The numbers of a normalised passage. One in brackets is of either sign, one with a percent
    sign is itself and a hundredth.

    >>> sorted(map(float, numbers("from $ 1,592 to ( 3.5 ) in 2012-2016 , 5%, not v2 or 1.2.3")))
    [-3.5, 0.05, 3.5, 5.0, 1592.0, 2012.0, 2016.0]
    """
    found = set()
    for match in _NUMBER.finditer(passage):
        value = Fraction(match["digits"].replace(",", ""))
        signed = {-value} if match["minus"] else {value}
        if match["open"] and match["close"]:
            signed = {value, -value}
        found |= signed | ({one / 100 for one in signed} if match["percent"] else set())
    return found


# --- arithmetic -----------------------------------------------------------------------------------


def _follows(text: Json, quotes: Sequence[str], answer: Json, terms: Terms) -> None:
    """Refuses an answer that the program does not give, or a program that is not supported."""
    if not isinstance(text, str):
        raise _Refused(f"wanted text as program, got {text!r:.80}")
    parsed = program(text)
    quoted = {number for quote in quotes for number in numbers(quote)}
    operands: list[Leaf] = []
    constants = 0
    for leaf in parsed.leaves:
        if isinstance(leaf, Row):
            operands.append(leaf)
        elif not leaf.constant and {leaf.value, -leaf.value} & quoted:
            operands.append(Number(abs(leaf.value)))
        elif leaf.value in terms.constants:
            constants += 1
        else:
            raise _Refused(f"the operand {_shown(leaf.value)} stands in no quotation")
    if not operands:
        raise _Refused("nothing that is quoted enters the program")
    if constants > MAX_CONSTANTS:
        raise _Refused(f"{constants} constants, at most {MAX_CONSTANTS} may be")
    rows = {leaf: _row(leaf, quotes, terms) for leaf in operands if isinstance(leaf, Row)}
    found = _valued(parsed, rows, {})
    if isinstance(found, bool):
        right = answers.same_text("yes" if found else "no", str(answer), ignore_case=True)
    else:
        _matter(parsed, rows, list(dict.fromkeys(operands)), found, terms)
        right = _near(found, answer, terms)
    if not right:
        raise _Refused(f"the program gives {_shown(found)}, the answer is {answer!r:.80}")


def _row(leaf: Row, quotes: Sequence[str], terms: Terms) -> tuple[Fraction, ...]:
    """The numbers of a row that is quoted whole: each cell's first."""
    name = normalised(leaf.name)
    for source in terms.sources.values():
        passage, cells = source.rows.get(name, ("", ()))
        if passage and passage in quotes:
            return tuple(_firsts(cells))
    raise _Refused(f"no row {leaf.name!r:.80} is quoted whole")


def _firsts(cells: Sequence[str]) -> Iterator[Fraction]:
    for cell in cells:
        if match := _NUMBER.search(normalised(cell)):
            value = Fraction(match["digits"].replace(",", ""))
            lower = match["minus"] or (match["open"] and match["close"])
            value = value / 100 if match["percent"] else value
            yield -value if lower else value


Rows = Mapping[Row, Sequence[Fraction]]


def _valued(parsed: Program, rows: Rows, factors: Mapping[Leaf, Fraction]) -> Fraction | bool:
    """The program's value, with other numbers in every place of the operands that have a factor."""

    def of(leaf: Leaf) -> Sequence[Fraction]:
        values = rows[leaf] if isinstance(leaf, Row) else [leaf.value]
        operand = Number(abs(leaf.value), leaf.constant) if isinstance(leaf, Number) else leaf
        if operand not in factors:
            return values
        return [value * factors[operand] + Fraction(1, 7) for value in values]

    return parsed.value(of)


def _matter(
    parsed: Program, rows: Rows, operands: Sequence[Leaf], found: Fraction, terms: Terms
) -> None:
    """Refuses a program in which an operand makes no difference, or all together hardly one: then
    its value is made of constants.
    """
    others = [Fraction(17, 11), Fraction(5, 13), Fraction(7, 3)]
    factors = {leaf: others[number % len(others)] for number, leaf in enumerate(operands)}
    for leaf in operands:
        told = leaf.name if isinstance(leaf, Row) else _shown(leaf.value)
        if _moved(parsed, rows, {leaf: factors[leaf]}, found) == 0:
            raise _Refused(f"the operand {told:.80} makes no difference")
    if _moved(parsed, rows, factors, found) <= Fraction(terms.relative) * abs(found):
        raise _Refused("what is quoted makes hardly a difference")


def _moved(
    parsed: Program, rows: Rows, factors: Mapping[Leaf, Fraction], found: Fraction
) -> Fraction:
    """By how much the value changes; where it has none any more, by more than anything."""
    try:
        return abs(_valued(parsed, rows, factors) - found)
    except NoProgram:
        return 1 + abs(found)


def _shown(value: Fraction | bool) -> str:
    try:
        return str(value) if isinstance(value, bool) else f"{float(value):g}"
    except OverflowError:
        return "beyond 1e308"


def _same(gold: Json, answer: Json, terms: Terms) -> bool:
    expected = answers.number(gold) if isinstance(gold, str) else Fraction(gold)
    if expected is None:
        return answers.same_text(gold, str(answer), ignore_case=True)
    return _near(expected, answer, terms)


def _near(expected: Fraction, answer: Json, terms: Terms) -> bool:
    found = answers.number(answer) if isinstance(answer, str) else Fraction(answer)
    bound = max(Fraction(terms.relative) * abs(expected), Fraction(terms.absolute))
    return found is not None and abs(expected - found) <= bound
