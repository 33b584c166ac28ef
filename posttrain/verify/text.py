"""The kind `text`: rules about the form of a text, such as its length, words, case and language.

Each rule is a small table, and each is exact about what it counts. They are constraints and no
proof of quality: a required word is there where it is only strewn in, a length is reached by
filling. The one thing that must stay true: a rule that says nothing (no bound, an unknown name) is
the task's mistake, and none holds over an empty text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import regex

from posttrain.core.errors import UsageError, nearest
from posttrain.core.task import Check, Json
from posttrain.verify import documents, guards, languages, segments
from posttrain.verify.decided import decided
from posttrain.verify.documents import Unreadable
from posttrain.verify.kinds import Subject, Tools, allowed, seconds_of
from posttrain.verify.layers import Finding
from posttrain.verify.submission import submitted

HOLDING = "posttrain.verify.text:holding"
Rule = Mapping[str, Json]
Look = Callable[[str, Rule], str]
"""Why a rule does not hold over a text; '' where it does."""


async def text(check: Check, subject: Subject, tools: Tools) -> Finding:
    """Whether rules hold over the reply, or over a declared file.

    Params: `rules` (a list of tables, each with the name of a `rule` and its parameters; `RULES`),
    `pays` (all, or the share of rules that hold), `may_echo` (whether the text may hold the whole
    objective; default false), `where` (`reply`, or `block`, its only fenced block) or `path` (a
    declared file), `timeout_s`.
    """
    allowed(check, "rules", "pays", "may_echo", "where", "path", "timeout_s")
    rules, pays = check.params.get("rules"), check.params.get("pays", "all")
    if not isinstance(rules, (list, tuple)) or not rules:
        raise UsageError(f"check 'text' wants a list of tables as 'rules', got {rules!r:.80}.")
    if pays not in ("all", "share"):
        raise UsageError(f"check 'text' pays 'all' or 'share', not {pays!r:.80}.")
    may_echo = check.params.get("may_echo", False)
    if not isinstance(may_echo, bool):
        raise UsageError(f"check 'text' wants true or false as 'may_echo', not {may_echo!r:.80}.")
    try:
        given = await submitted(check, subject, "text", "markdown", "md")
    except Unreadable as error:
        return Finding(value=0.0, evidence={"refused": str(error)})
    echo = guards.not_echo(given, subject.task.description.objective).reason
    if echo and not may_echo:
        return Finding(value=0.0, evidence={"refused": echo})
    found = await decided(
        tools, HOLDING, (given, rules), ("sound", rules), timeout_s=seconds_of(check)
    )
    if found.refused:
        return Finding(value=0.0, evidence={"refused": found.refused})
    if "fault" in found.answer:
        raise UsageError(f"check 'text': {found.answer['fault']}")
    told = [why for why in found.answer["told"] if why]
    value = 1.0 - len(told) / len(rules) if pays == "share" else float(not told)
    return Finding(value=value, evidence={"broken": told} if told else {})


def holding(given: str, rules: Sequence[Rule]) -> Json:
    """`{"told": …}`, for each rule why it does not hold, '' where it does; or `{"fault": …}` of
    the rules; for workers only.
    """
    try:
        looks = [(_look(rule), rule) for rule in rules]
        seen = segments.visible(given).strip()
        empty = "" if guards.not_empty(seen).value else "there is no text"
        return {"told": [look(seen, rule) or empty for look, rule in looks]}
    except UsageError as error:
        return {"fault": str(error)}


def _look(rule: Rule) -> Look:
    name = rule.get("rule") if isinstance(rule, Mapping) else None
    if not isinstance(name, str) or name not in RULES:
        hint = nearest(str(name), RULES)
        raise UsageError(f"no rule {rule!r:.80}{hint}.", f"name one of {', '.join(RULES)}")
    look, parameters = RULES[name]
    for key, value in rule.items():
        if key not in ("rule", *parameters):
            raise UsageError(f"rule {name!r} has no {key!r}{nearest(key, parameters)}.")
        if not isinstance(value, _TYPES.get(key, str)) or isinstance(value, bool) != (
            key == "ignore_case"
        ):
            raise UsageError(f"rule {name!r} has an odd {key!r}: {value!r:.80}.")
    return look


# --- rules ----------------------------------------------------------------------------------------


def _number(found: int, what: str, rule: Rule, least: int | None = None) -> str:
    """Why a number is not within the rule's bounds."""
    low, high = rule.get("min", None if "max" in rule else least), rule.get("max")
    if low is None and high is None:
        raise UsageError(f"rule {rule['rule']!r} wants 'min', 'max' or both.")
    if min(low or 0, high or 0) < 0:
        raise UsageError(f"rule {rule['rule']!r} has a bound below 0: {dict(rule)!r:.80}.")
    if high is not None and (low or 0) > high:
        raise UsageError(f"rule {rule['rule']!r} has a 'min' above its 'max'.")
    if low is not None and found < low:
        return f"{what}: {found}, wanted at least {low}"
    return f"{what}: {found}, wanted at most {high}" if high is not None and found > high else ""


def _length(given: str, rule: Rule) -> str:
    unit = str(rule.get("unit"))
    if unit not in segments.UNITS:
        raise UsageError(
            f"no unit {unit!r}{nearest(unit, segments.UNITS)}.",
            f"name one of {', '.join(segments.UNITS)}",
        )
    return _number(segments.UNITS[unit](given), unit, rule)


def _count(given: str, rule: Rule) -> str:
    named = [
        key for key in ("word", "text", "pattern") if segments.visible(rule.get(key, "")).strip()
    ]
    if len(named) != 1:
        raise UsageError("rule 'count' wants one of 'word', 'text' and 'pattern'.")
    wanted = rule[named[0]]
    if named[0] != "pattern":
        parts = segments.visible(wanted, "NFKC").split()
        wanted = r"\s+".join(regex.escape(part) for part in parts)
    if named[0] == "word":
        wanted = rf"{_EDGE_BEFORE}{wanted}{_EDGE_AFTER}"
    flags = regex.V1 | regex.M | (regex.I | regex.F if rule.get("ignore_case") else 0)
    try:
        pattern = regex.compile(wanted, flags=flags)
        if pattern.match(""):
            raise UsageError(f"rule 'count' has a 'pattern' that is everywhere: {wanted!r:.80}.")
        found = pattern.findall(segments.visible(given, "NFKC"))
    except regex.error as error:
        raise UsageError(f"rule 'count' wants a 'pattern', got {wanted!r:.80}: {error}.") from None
    return _number(len(found), f"{named[0]} {rule[named[0]]!r:.60}", rule, least=1)


_ALONE = (
    rf"\p{{L}}\p{{M}}\p{{N}}_--[{segments.UNSPACED}\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}]"
)
_EDGE_BEFORE, _EDGE_AFTER = (
    rf"(?:(?<![{_ALONE}])|(?![{_ALONE}]))", rf"(?:(?![{_ALONE}])|(?<![{_ALONE}]))",
)  # fmt: skip
"""The edges of a word: no letter, mark or digit goes on there, but for scripts without spaces."""


def _edge(at_start: bool) -> Look:
    def look(given: str, rule: Rule) -> str:
        wanted = segments.visible(_required(rule, "text"), "NFKC").strip()
        seen = segments.visible(given, "NFKC").strip()
        if rule.get("ignore_case"):
            wanted, seen = wanted.casefold(), seen.casefold()
        right = seen.startswith(wanted) if at_start else seen.endswith(wanted)
        shown = seen[:40] if at_start else seen[-40:]
        return "" if right else f"{rule['rule']} {rule['text']!r:.60}: got {shown!r}"

    return look


def _required(rule: Rule, key: str) -> str:
    value = rule.get(key)
    if not value or (isinstance(value, str) and not segments.visible(value).strip()):
        raise UsageError(f"rule {rule['rule']!r} wants {key!r}.")
    return str(rule[key])


def _case(given: str, rule: Rule) -> str:
    wanted = _required(rule, "is")
    if wanted not in ("lower", "upper"):
        raise UsageError(f"rule 'case' is 'lower' or 'upper', not {wanted!r:.80}.")
    wrong, right = (r"[\p{Lu}\p{Lt}]", r"\p{Ll}")
    if wanted == "upper":
        wrong, right = (r"[\p{Ll}\p{Lt}]", r"\p{Lu}")
    if found := regex.search(rf"\S*{wrong}\S*", given):
        return f"case: {found[0][:40]!r} is not {wanted}"
    return "" if regex.search(right, given) else f"case: nothing is {wanted}"


def _title(given: str, rule: Rule) -> str:
    found = regex.search(r"<<[^<>\n]*[\p{L}\p{N}][^<>\n]*>>", given)
    return "" if found else "title: none in << >>"


def _postscript(given: str, rule: Rule) -> str:
    marker = regex.escape(rule.get("marker", "P.S."))
    found = regex.search(rf"(?:^|\n)[ \t]*{marker}[ \t]*[^\s][^\n]*(?:\n[^\n]+)*\s*\Z", given)
    return "" if found else f"postscript: none after {rule.get('marker', 'P.S.')!r} at the end"


def _sections(given: str, rule: Rule) -> str:
    """Numbered 1, 2, … in order, each with something in it."""
    marker = regex.escape(_required(rule, "marker"))
    head = rf"^[ \t]*(?:#{{1,6}}[ \t]+|\*\*)?{marker}[ \t]+(\d{{1,3}})\b"
    heads = list(regex.finditer(head, given, flags=regex.M))
    ends = [*(one.start() for one in heads[1:]), len(given)]
    for number, (one, end) in enumerate(zip(heads, ends, strict=False), 1):
        if int(one[1]) != number:
            return f"sections: number {one[1]} where {number} should be"
        if not regex.search(r"[\p{L}\p{N}]", given[one.end() : end]):
            return f"sections: nothing in number {number}"
    return _number(len(heads), "sections", rule)


def _quoted(given: str, rule: Rule) -> str:
    pairs = ('""', "“”", "„“", "«»", "「」")
    inside = given[1:-1].strip()
    right = bool(inside) and given[0] + given[-1] in pairs and not set(inside) & set(given[0])
    return "" if right else "quoted: not one quotation from end to end"


def _json(given: str, rule: Rule) -> str:
    try:
        documents.json_value(documents.block(given, "json") if given.startswith("```") else given)
    except Unreadable as error:
        return f"json: {error}"
    return ""


def _language(given: str, rule: Rule) -> str:
    return languages.other_language(given, _required(rule, "is"))


def _script(given: str, rule: Rule) -> str:
    names, share = rule.get("is"), rule.get("share", 1.0)
    names = [names] if isinstance(names, str) else names
    if not names or not all(isinstance(name, str) for name in names) or not 0 < share <= 1:
        raise UsageError(f"rule 'script' wants names as 'is' and a share, got {dict(rule)!r:.80}.")
    return languages.other_script(given, names, share)


_BOUNDS = ("min", "max")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "min": int, "max": int, "ignore_case": bool, "share": (int, float), "is": (str, list),
}  # fmt: skip
"""Types of parameters; the others are texts."""
RULES: Mapping[str, tuple[Look, Sequence[str]]] = {
    "length": (_length, ("unit", *_BOUNDS)),
    "count": (_count, ("word", "text", "pattern", "ignore_case", *_BOUNDS)),
    "starts_with": (_edge(True), ("text", "ignore_case")),
    "ends_with": (_edge(False), ("text", "ignore_case")),
    "case": (_case, ("is",)),
    "title": (_title, ()),
    "postscript": (_postscript, ("marker",)),
    "sections": (_sections, ("marker", *_BOUNDS)),
    "quoted": (_quoted, ()),
    "json": (_json, ()),
    "language": (_language, ("is",)),
    "script": (_script, ("is", "share")),
}
"""Each rule with its parameters."""
