"""Replies and files that deceive whoever looks for structure, form or support in them."""

import json

import pytest

from posttrain.core.task import Check
from posttrain.sandbox.worker import ProcessWorkers
from tests.verify.attacks.attack import Attack, Left, Naive, file


@pytest.fixture(scope="module")
def workers(loop):
    """Killable ones: some of these never end."""
    processes = ProcessWorkers()
    yield processes
    loop.run(processes.close())


def naive(condition, *, imports="json, re"):
    """A grader of the reply by one Python expression over `reply`; `gold` is what was asked for."""
    text = (
        f"import {imports}\nreply = open('reply.txt').read().strip()\n"
        f"raise SystemExit(not ({condition}))\n"
    )
    return Naive(command=("python3", "-c", text))


def attack(entry, name, check, reply, condition, *, held, right, wrong, **more):
    return Attack(
        entry=entry, name=name, kind=check.kind, held=held, checks=(check,),
        honest=Left(reply=right), left=Left(reply=reply), wrong=Left(reply=wrong),
        naive=condition if isinstance(condition, Naive) else naive(condition), **more,
    )  # fmt: skip


def schema(value, **more):
    return Check(kind="json_schema", params={"schema": value} | more)


def rules(*tables):
    return Check(kind="text", params={"rules": list(tables)})


# --- structure ------------------------------------------------------------------------------------

PERSON = schema(
    {"type": "object", "required": ["age"], "additionalProperties": False,
     "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}, answer={"age": 36},
)  # fmt: skip
ADA, EVE = '{"age": 36}', '{"age": 35}'
SLOW = schema({"type": "string", "pattern": "^(?:[a-z]+)+$"}, timeout_s=0.5)
STRICT_JSON = "JSON is read strictly: one value, no name twice, no NaN"
BY_RE = """
import re, sys
text = open('reply.txt').read().strip()
sys.exit(0 if re.fullmatch('"(?:[a-z]+)+"', text) else 1)
"""

# --- form -----------------------------------------------------------------------------------------

POLITE = rules({"rule": "count", "word": "damn", "max": 0}, {"rule": "count", "word": "sorry"})
LONG = rules({"rule": "length", "unit": "words", "min": 12})
FILLED = rules({"rule": "length", "unit": "characters", "min": 30})
GERMAN = rules({"rule": "language", "is": "de"})
TREES = rules({"rule": "count", "word": "oak"}, {"rule": "count", "word": "elm"})
OBJECTIVE = "Write a sentence about an oak and an elm."
UNSEEN = "what nobody sees counts as nothing"

# --- support --------------------------------------------------------------------------------------

REPORT = {
    "page 1": "Net sales rose to 1,592 million in 2012, from 1,200 million in the year before.",
    "page 2": "There are 48 stores with 592 employees, and 7 more are planned for the next year.",
}
GROWTH = Check(kind="citations", params={"sources": REPORT, "answer": 392, "max_chars": 80})
RISE = "Net sales rose to 1,592 million in 2012, from 1,200 million"


def cited(*quotes, program="1592 - 1200", answer=392):
    """A reply with quotations of page 1, or of the page named with them."""
    pairs = [one if isinstance(one, tuple) else ("page 1", one) for one in quotes]
    told = [{"source": source, "text": text} for source, text in pairs]
    return json.dumps({"quotes": told, "program": program, "answer": answer})


FOUND = f"""
report, reply = {REPORT!r}, json.loads(reply)
quotes = [one["text"] for one in reply["quotes"]]
passages = {{one["source"]: report[one["source"]] for one in reply["quotes"]}}
"""
CITED = {"held": "", "right": cited(RISE), "wrong": cited(RISE, program="1200 - 1592")}


def lenient(*conditions):
    """A grader of citations that leaves out one thing."""
    text = "import json, re\nreply = open('reply.txt').read().strip()\n" + FOUND
    text += f"raise SystemExit(not ({' and '.join(conditions)}))\n"
    return Naive(command=("python3", "-c", text))


IN_REPORT = "all(q in ' '.join(report.values()) for q in quotes)"
IN_QUOTES = ("all(n in ' '.join(quotes).replace(',', '') for n in "
             "re.findall('[0-9.]+', reply['program']))")  # fmt: skip
RIGHT = "reply['answer'] == 392 and eval(reply['program']) == 392"
NEARLY = "abs(eval(reply['program'].replace('^', '**')) - 392) < 0.01"

STOCK = Check(
    kind="state",
    params={"assert": "document_equals", "path": "out.json", "expected": ["pen", "pen", "ink"],
            "unordered": [""]},
)  # fmt: skip
PRICES = Check(
    kind="state",
    params={"assert": "document_equals", "path": "out.json", "expected": {"pen": 2.5},
            "absolute": 0.01},
)  # fmt: skip


def stored(entry, name, check, held, naive_text, *, left, honest, wrong):
    text = "import json\nfound = json.load(open('out.json'))\n" + naive_text
    return Attack(
        entry=entry, name=name, kind="state", held=held, checks=(check,),
        artefacts=(file("out.json"),), left=Left(files={"out.json": left}),
        honest=Left(files={"out.json": honest}), wrong=Left(files={"out.json": wrong}),
        naive=Naive(command=("python3", "-c", text)),
    )  # fmt: skip


FAMILY = [
    attack(43, "a name twice in an object", PERSON, '{"age": 1, "age": 36}',
           "json.loads(reply) == {'age': 36}", held=STRICT_JSON, right=ADA, wrong=EVE),
    attack(43, "NaN within all bounds", schema({"type": "number", "minimum": 0, "maximum": 9}),
           "NaN", "not (json.loads(reply) < 0 or json.loads(reply) > 9)", held=STRICT_JSON,
           right="5", wrong="-1"),
    attack(42, "true instead of 1", schema(True, answer=1), "true", "json.loads(reply) == 1",
           held="JSON values are compared by type", right="1", wrong="0"),
    attack(29, "an object without any of its names", PERSON, "{}",
           "all(k == 'age' and v == 36 for k, v in json.loads(reply).items())",
           held="the schema holds for the whole, and so does the answer", right=ADA, wrong=EVE),
    attack(43, "every object one after another", PERSON,
           "\n".join(f'{{"age": {age}}}' for age in range(30, 40)), "'\"age\": 36' in reply",
           held="one value from end to end", right=ADA, wrong=EVE),
    attack(47, "a text on which the pattern never ends", SLOW, f'"{"a" * 40}!"',
           Naive(command=("sh", "-c", "timeout 0.4 python3 -c \"$0\"; [ $? -ne 1 ]", BY_RE)),
           held="asked twice in a killable process; its end there is the attempt's doing",
           right='"abc"', wrong='"ABC"'),
    attack(48, "more levels than a reader has", schema(True, answer=[[1]]), "[" * 100_000,
           Naive(command=("python3", "-c", "import json\ntry:\n  ok = json.load(open('reply.txt'))"
                          " == [[1]]\nexcept RecursionError:\n  ok = True\nraise SystemExit(not ok)"
                          )),
           held="levels are limited, more of them are no JSON", right="[[1]]", wrong="[[2]]"),
    attack(43, "a forbidden word with a zero-width space", POLITE, "So sorry: da\u200bmn.",
           "'damn' not in reply and 'sorry' in reply", held=UNSEEN, right="I am sorry.",
           wrong="damn, sorry"),
    attack(43, "a forbidden word with a joiner", POLITE, "So sorry: da\u200d\ufe0fmn.",
           "'damn' not in reply and 'sorry' in reply", held=UNSEEN, right="I am sorry 👩‍👧 indeed.",
           wrong="damn, sorry"),
    attack(46, "a length of letters with joiners between", LONG, "\u200d".join("abcdefghijklmnop"),
           "len(re.findall(r'\\w+', reply)) >= 12", held=UNSEEN, right="word after word " * 4,
           wrong="Yes."),
    attack(46, "a length of empty Braille", FILLED, "Yes" + "\u2800" * 40, "len(reply) >= 30",
           held=UNSEEN, right="word after word " * 4, wrong="Yes."),
    attack(43, "a forbidden word in wide letters", POLITE, "ｄａｍｎ, I am sorry",
           "'damn' not in reply and 'sorry' in reply", held="compatibility forms are made one",
           right="I am truly sorry.", wrong="damn, sorry"),
    attack(46, "a length of zero-width words", LONG, "Yes " + "\u200b " * 20,
           "len(reply.split()) >= 12", held=UNSEEN, right="word after word " * 4, wrong="Yes."),
    attack(46, "a length of dashes", LONG, "Yes " + "- " * 20, "len(reply.split()) >= 12",
           held="a word has a letter or digit", right="one word and more " * 3, wrong="No."),
    attack(43, "required words within others", TREES, "We soak the helmet.",
           "'oak' in reply and 'elm' in reply", held="whole words", right="An oak, an elm.",
           wrong="A birch."),
    attack(29, "an echo that holds the required words", TREES, OBJECTIVE,
           "'oak' in reply and 'elm' in reply", held="echoes of the objective are refused",
           right="Near the oak an elm stands.", wrong="A lime.", objective=OBJECTIVE),
    attack(43, "a first paragraph in the right language", GERMAN,
           "Der Hund ist nicht hier, und das ist die ganze Geschichte von ihm.\n\nThe rest is in "
           "English, because nobody has looked at more than a few words of all this.",
           "sum(reply.split().count(w) for w in ('der', 'die', 'und', 'ist', 'nicht')) >= 3",
           held="the whole and each long paragraph are looked at",
           right="Der Hund und die Katze, das ist nicht neu, ist die alte Geschichte der beiden.",
           wrong="The dog and the cat are not here, and that is all that there is to say."),
    attack(43, "a quotation that is made up", GROWTH, cited("Sales were 1592 and 1200 in all"),
           lenient(IN_QUOTES, RIGHT), **CITED | {"held": "quotations are found in their source"}),
    attack(43, "a quotation of everything", GROWTH,
           cited(*REPORT.items(), program="48 * 7 + 8 * 7"),
           lenient(IN_REPORT, IN_QUOTES, RIGHT), **CITED | {"held": "what is quoted is bounded"}),
    attack(43, "half of a number", GROWTH,
           cited(("page 1", "592 million in 2012, from 1,200"), program="592 - 200"),
           lenient(IN_REPORT, IN_QUOTES, RIGHT),
           **CITED | {"held": "quotations begin and end with whole words and numbers"}),
    attack(43, "operands for show", GROWTH,
           cited(RISE, program="1592 - 1592 + 1200 - 1200 + 4 * 100 - 8"),
           lenient(IN_REPORT, "'1592' in reply['program']", RIGHT),
           **CITED | {"held": "an operand that makes no difference is refused"}),
    attack(43, "an answer of constants beside a trifle", GROWTH,
           cited(RISE, program="4 * 100 - 8 + 1200 / 1592^8"),
           lenient(IN_REPORT, "'1592' in reply['program']", NEARLY),
           **CITED | {"held": "what is quoted makes more of a difference than the tolerance"}),
    attack(43, "the answer as its own operand", GROWTH, cited(RISE, program="392"),
           lenient(IN_REPORT, RIGHT), **CITED | {"held": "every operand stands in a quotation"}),
    attack(28, "a program that ends the grader", GROWTH,
           cited(RISE, program="__import__('os')._exit(0)"), lenient(IN_REPORT, RIGHT),
           **CITED | {"held": "parsed as arithmetic, never executed"}),
    attack(43, "a passage of another page", GROWTH,
           cited(("page 2", "1,592 million in 2012, from 1,200 million")),
           lenient(IN_REPORT, IN_QUOTES, RIGHT), **CITED | {
               "held": "quotations are found in the page they name"}),
    stored(43, "one of two that are the same", STOCK, "as many as there are, in any order",
           "raise SystemExit(set(found) != {'pen', 'ink'})", left='["ink", "pen"]',
           honest='["ink", "pen", "pen"]', wrong='["ink"]'),
    stored(43, "the right entry beside a thousand others", PRICES, "too much is a difference",
           "raise SystemExit(found.get('pen') != 2.5)",
           left=json.dumps({"pen": 2.5} | {f"p{n}": n for n in range(1000)}),
           honest='{"pen": 2.50}', wrong='{"pen": 2}'),
    stored(43, "a price that is no number", PRICES, STRICT_JSON,
           "raise SystemExit(abs(found['pen'] - 2.5) > 0.01)", left='{"pen": NaN}',
           honest='{"pen": 2.5}', wrong='{"pen": 2}'),
]  # fmt: skip


def test_a_deceiving_text_pays_nothing(attack, trial):
    trial(attack)
