import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.clock import RealClock
from posttrain.core.errors import UsageError
from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from posttrain.verify import segments
from posttrain.verify.kinds import Tools
from posttrain.verify.languages import told
from posttrain.verify.stack import Stack
from posttrain.verify.text import holding, text

HOLDS = {
    "length": [
        ({"unit": "words", "min": 3, "max": 3}, "one, two; three!", "one two"),
        ({"unit": "sentences", "max": 2}, "It is 3.5 m. Dr. Who said so.", "A b. C d? E f!"),
        ({"unit": "sentences", "min": 2}, "今日は。元気？", "今日は元気。"),
        ({"unit": "sentences", "min": 3}, "- one thing\n- another\n- a third", "one thing."),
        ({"unit": "paragraphs", "min": 2}, "a\n\nb", "a\nb\n\n***"),
        ({"unit": "lines", "max": 2}, "a\n\n\nb\n", "a\nb\nc"),
        ({"unit": "characters", "max": 4}, "néé👩‍👩‍👧", "abcde"),
        ({"unit": "bullets", "min": 2, "max": 2}, "Two:\n* a\n* b", "- a\n-- b"),
        ({"unit": "headings", "min": 1}, "# A\ntext", "#A\ntext"),
    ],
    "count": [
        ({"word": "cat"}, "The cat's out.", "category concat cat_"),
        ({"word": "cat", "max": 0}, "category", "cat"),
        ({"word": "Cat", "ignore_case": True, "min": 2}, "cat, CAT", "Cat category"),
        ({"word": "straße", "ignore_case": True}, "STRASSE", "stras"),
        ({"word": "New York"}, "in New\nYork", "NewYork"),
        ({"word": "東京"}, "私は東京に住む", "京都"),
        ({"text": ",", "max": 0}, "no comma here", "one, comma"),
        ({"text": "!", "min": 2, "max": 2}, "a! b!", "a!!!"),
        ({"pattern": r"\[[^\[\]\n]+\]", "min": 2}, "[name] and [date]", "[] [name]"),
        ({"pattern": r"\b\p{Lu}{2,}\b", "max": 1}, "ONE two", "ONE TWO"),
        ({"pattern": "^step", "min": 2}, "step 1\nstep 2", "step 1 step 2"),
    ],
    "starts_with": [({"text": "Dear"}, "  Dear you", "My Dear")],
    "ends_with": [
        ({"text": "Yours."}, "Well. Yours.\n", "Yours. Well."),
        ({"text": "the END", "ignore_case": True}, "It is The end", "the end is near"),
    ],
    "case": [({"is": "lower"}, "all é 1!", "All"), ({"is": "upper"}, "ALL 1!", "ALL b"),
             ({"is": "upper"}, "A", "1 2 3")],
    "title": [({}, "<<A day>>\ntext", "<< >> text")],
    "postscript": [({}, "Text.\n\nP.S. More.", "P.S. More.\n\nText."),
                   ({"marker": "P.P.S"}, "Text.\nP.P.S: more", "Text.\nP.P.S")],
    "sections": [({"marker": "Part", "min": 2}, "Part 1\na\n## Part 2: b", "Part 1\na\nPart 3\nb"),
                 ({"marker": "Part", "max": 1}, "Part 1\na", "Part 1\n\nPart 2\nb")],
    "quoted": [({}, '"All of it."', '"All" of "it"'), ({}, "“All of it.”", '""')],
    "json": [({}, '{"a": 1}', '{"a": 1, "a": 2}'), ({}, '```json\n[1]\n```', "[1] and")],
    "language": [({"is": "de"}, "Der Hund läuft heute über die Straße.",
                  "The dog runs across the street today."),
                 ({"is": "fr"}, "Le chien traverse la rue tous les matins.", "Le chien"),
                 ({"is": "en"}, "The dog runs. " * 5, "The dog runs across the street.\n\n"
                  "Der Hund läuft heute über die lange Straße, und niemand hält ihn auf.")],
    "script": [({"is": "Cyrillic"}, "Привет, мир! 42", "Привет, мiр и world"),
               ({"is": "Cyrillic", "share": 0.5}, "Привет ok", "okay Да"),
               ({"is": ["Han", "Hiragana", "Katakana"]}, "東京タワーです", "Tokyo 東京")],
}  # fmt: skip


def why(rule, given, **more):
    found = holding(given, [{"rule": rule} | more])
    assert "fault" not in found, found
    return found["told"][0]


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule in HOLDS for case in HOLDS[rule]])
def test_a_rule_holds_over_what_it_says_and_not_beside_it(rule, case):
    table, good, bad = case
    assert why(rule, good, **table) == ""
    assert why(rule, bad, **table) != ""
    assert why(rule, " \u200b\n", **table) != "", "nothing holds over no text"


@pytest.mark.parametrize("given", ["b\u200bad", "b\u00adad", "ｂａｄ", "b\u2060a\ufeffd"])
def test_a_forbidden_word_is_found_behind_what_nobody_sees(given):
    assert why("count", f"It is {given}.", word="bad", max=0)


def test_a_letter_that_only_looks_alike_is_another_letter_and_the_script_says_so():
    disguised = "It is b\u0430d."  # a Cyrillic letter
    assert why("count", disguised, word="bad", max=0) == ""
    assert why("script", disguised, **{"is": "Latin"})


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"rule": "lenght", "unit": "words", "min": 1}, "did you mean 'length'"),
        ({"unit": "words"}, "no rule"),
        ("words", "no rule"),
        ({"rule": "length", "unit": "words"}, "wants 'min', 'max' or both"),
        ({"rule": "length", "unit": "word", "min": 1}, "did you mean 'words'"),
        ({"rule": "length", "unit": "words", "min": "3"}, "odd 'min': '3'"),
        ({"rule": "length", "unit": "words", "min": True}, "odd 'min'"),
        ({"rule": "length", "unit": "words", "min": 3, "max": 2}, "'min' above its 'max'"),
        ({"rule": "count", "min": 1}, "wants one of 'word', 'text' and 'pattern'"),
        ({"rule": "count", "word": "a", "text": "b"}, "wants one of"),
        ({"rule": "count", "word": " "}, "wants one of"),
        ({"rule": "count", "word": "\u200b"}, "wants one of"),
        ({"rule": "count", "pattern": "x*"}, "is everywhere"),
        ({"rule": "count", "word": "a", "min": -1}, "below 0"),
        ({"rule": "starts_with", "text": "\u200b "}, "wants 'text'"),
        ({"rule": "count", "pattern": "("}, "wants a 'pattern'"),
        ({"rule": "count", "word": "a", "ignore_case": 1}, "odd 'ignore_case'"),
        ({"rule": "case", "is": "title"}, "'lower' or 'upper'"),
        ({"rule": "starts_with"}, "wants 'text'"),
        ({"rule": "language", "is": "xx"}, "no language 'xx'"),
        ({"rule": "script", "is": "Klingon"}, "no scripts"),
        ({"rule": "script", "is": []}, "wants names"),
        ({"rule": "quoted", "min": 1}, "has no 'min'"),
    ],
)
def test_a_rule_that_says_nothing_is_the_tasks_mistake(rule, told, find):
    with pytest.raises(UsageError, match=told):
        find(text, Check(kind="text", params={"rules": [rule]}), "some text to look at")


RULES = [{"rule": "length", "unit": "words", "max": 4}, {"rule": "count", "word": "sun"}]


def test_all_rules_pay_or_a_share_where_it_is_declared(find):
    def found(reply, **more):
        return find(text, Check(kind="text", params={"rules": RULES} | more), reply)

    assert found("The sun shines.").value == 1.0
    assert found("The moon shines.").value == 0.0
    assert found("The moon shines.").evidence == {"broken": ["word 'sun': 0, wanted at least 1"]}
    assert found("The moon shines.", pays="share").value == 0.5
    assert found("", pays="share").value == 0.0
    for bad in ({"rules": []}, {"rules": "all"}, {"pays": "most"}, {"rulez": []}, {"may_echo": 1}):
        with pytest.raises(UsageError):
            found("x", **bad)


def test_an_echo_of_the_objective_is_refused_unless_it_may_be_one(find):
    params = {"rules": [{"rule": "count", "word": "sun"}]}
    more = {"objective": "Write about the sun and the moon."}
    found = find(text, Check(kind="text", params=params), more["objective"], **more)
    assert (found.value, found.evidence["refused"]) == (0.0, "echo of the prompt")
    params["may_echo"] = True
    assert find(text, Check(kind="text", params=params), more["objective"], **more).value == 1.0


def test_a_text_on_which_a_pattern_never_ends_pays_0(make_attempt):
    rules = [{"rule": "count", "pattern": "(?:x+x+)+y", "max": 0}]
    check = Check(kind="text", params={"rules": rules, "timeout_s": 0.5})

    async def verdict(reply):
        async with ProcessWorkers() as workers:
            tools = Tools(clock=RealClock(), workers=workers)
            return await Stack(tools).verify(make_attempt(reply, checks=[check]), None)

    found = asyncio.run(verdict("x" * 5000))
    assert (found.reward, found.errors) == (0.0, ())
    assert asyncio.run(verdict("an honest text")).reward == 1.0


def rule(name, is_=None, **table):
    return {"rule": name} | ({"is": is_} if is_ else {}) | table


LONG_ENGLISH = "The dog runs across the street and nobody is there to stop it. "
IFEVAL = {
    "keywords:existence": (
        [rule("count", word="oak"), rule("count", word="elm")],
        "oak, elm",
        "oak",
    ),
    "keywords:frequency": ([rule("count", word="oak", min=2)], "oak oak", "oak"),
    "keywords:forbidden_words": ([rule("count", word="oak", max=0)], "soak", "oak"),
    "keywords:letter_frequency": ([rule("count", text="q", max=1)], "q", "qq"),
    "language:response_language": (
        [rule("language", "en")],
        LONG_ENGLISH,
        "Der Hund ist heute nicht auf der Straße.",
    ),
    "length:number_sentences": (
        [rule("length", unit="sentences", max=2)],
        "A b. C d.",
        "Ab. Cd. Ef.",
    ),
    "length:number_paragraphs": (
        [rule("length", unit="paragraphs", min=2, max=2)],
        "a\n\n***\n\nb",
        "a",
    ),
    "length:number_words": ([rule("length", unit="words", min=3)], "a b c", "a b"),
    "length:nth_paragraph_first_word": (
        [rule("count", pattern=r"(?s)\A.+?\n\n+Then\b")],
        "a b\n\nThen c",
        "Then\n\nb",
    ),
    "detectable_content:number_placeholders": (
        [rule("count", pattern=r"\[[^\[\]\n]+\]")],
        "[a]",
        "[]",
    ),
    "detectable_content:postscript": ([rule("postscript")], "a\nP.S. b", "a"),
    "detectable_format:number_bullet_lists": (
        [rule("length", unit="bullets", min=2, max=2)],
        "* a\n* b",
        "* a",
    ),
    "detectable_format:constrained_response": (
        [rule("count", pattern=r"\AMy answer is (?:yes|no|maybe)\.\Z")],
        "My answer is no.",
        "no",
    ),
    "detectable_format:number_highlighted_sections": (
        [rule("count", pattern=r"\*[^*\n]+\*", min=2)],
        "*a* *b*",
        "*a*",
    ),
    "detectable_format:multiple_sections": (
        [rule("sections", marker="SECTION", min=2)],
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    "detectable_format:json_format": ([rule("json")], "{}", "{"),
    "detectable_format:title": ([rule("title")], "<<a>>", "<a>"),
    "combination:two_responses": (
        [rule("count", pattern=r"\w\s*\*{6}\s*\w", max=1, min=1)],
        "a\n******\nb",
        "a\n******",
    ),
    "combination:repeat_prompt": ([rule("starts_with", text="Do it.")], "Do it. Done.", "Done."),
    "startend:end_checker": ([rule("ends_with", text="Bye.")], "a Bye.", "Bye. a"),
    "startend:quotation": ([rule("quoted")], '"a"', "a"),
    "change_case:english_capital": (
        [rule("case", "upper"), rule("language", "en")],
        LONG_ENGLISH.upper(),
        LONG_ENGLISH,
    ),
    "change_case:english_lowercase": (
        [rule("case", "lower"), rule("language", "en")],
        LONG_ENGLISH.lower(),
        LONG_ENGLISH,
    ),
    "change_case:capital_word_frequency": (
        [rule("count", pattern=r"\b\p{Lu}+\b", max=1)],
        "A b",
        "A B",
    ),
    "punctuation:no_comma": ([rule("count", text=",", max=0)], "a b", "a, b"),
}


@pytest.mark.parametrize("instruction", IFEVAL)
def test_each_kind_of_instruction_of_ifeval_can_be_written(instruction):
    """All 25 of arXiv 2311.07911, table 1."""
    rules, good, bad = IFEVAL[instruction]
    assert not any(holding(good, rules)["told"])
    assert any(holding(bad, rules)["told"])


# --- counting -------------------------------------------------------------------------------------


@given(st.lists(st.from_regex(r"[a-zé0-9]{1,4}", fullmatch=True), max_size=6))
def test_words_are_what_stands_between_spaces_in_plain_text(parts):
    assert segments.words(" ".join(parts)) == len(parts)
    assert segments.words(" — ".join(parts)) == len(parts)


@given(st.lists(st.sampled_from(["Go on", "It is 3.5 m", "No", "Why not"]), max_size=5))
def test_sentences_are_what_ends(parts):
    assert segments.sentences("".join(f"{part}. " for part in parts)) == len(parts)
    assert segments.sentences("\n\n".join(parts)) == len(parts)


@given(st.text(max_size=20), st.sampled_from(["\u200b", "\u00ad", "\u2060", "\ufeff"]))
def test_what_is_not_seen_counts_as_nothing(given_text, unseen):
    seen = segments.visible(given_text)
    assert segments.visible(seen) == seen
    stuffed = segments.visible(unseen.join(seen))
    for count in segments.UNITS.values():
        assert count(segments.visible(stuffed)) == count(segments.visible("".join(seen)))


@given(st.text("ab c_-", max_size=12))
def test_a_whole_word_is_one_by_the_edges_of_letters(given_text):
    expected = len(re.findall(r"\bab\b", given_text))
    holds = {"rule": "count", "word": "ab", "min": expected, "max": expected}
    assert holding(given_text + " x", [holds])["told"] == [""]


EVERY = [{"rule": rule} | cases[0][0] for rule, cases in HOLDS.items()]


@given(st.text(max_size=60))
def test_whatever_is_said_is_judged(given_text):
    """What raises here a policy could choose over reward 0."""
    assert len(holding(given_text, EVERY)["told"]) == len(EVERY)


SHORT = {
    "en": "Please enter a valid number.", "de": "Bitte geben Sie eine gültige Zahl ein.",
    "fr": "Veuillez saisir un nombre valide.", "es": "Introduzca un número válido, por favor.",
    "it": "Inserire un numero valido.", "nl": "Voer een geldig getal in.",
    "pl": "Wpisz poprawną liczbę.", "ru": "Введите правильное число.",
    "ja": "有効な数字を入力してください。", "zh": "请输入一个有效的数字。",
    "ar": "الرجاء إدخال رقم صحيح.",
}  # fmt: skip


@pytest.mark.parametrize("code", SHORT)
def test_short_sentences_are_told_apart(code):
    assert told(SHORT[code]) == code
