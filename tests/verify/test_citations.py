import contextlib
import gzip
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.task import Check
from posttrain.verify import citations as module
from posttrain.verify import documents
from posttrain.verify.arithmetic import NoProgram
from posttrain.verify.citations import citations, normalised, numbers
from posttrain.verify.documents import Unreadable

REPORT = {
    "page 1": "Revenue rose to $ 1,592 million in 2012, from “1 200 million” a year before. The "
    "board, as ever, was pleased — margins fell by 3.5%.",
    "table": [["", "2011", "2012"], ["net sales", "$ 1,200", "$ 1,592"], ["other ( 1 )", "(40)",
                                                                        "25"]],
}  # fmt: skip
GROWTH = {
    "quotes": [
        {"source": "page 1", "text": "Revenue rose to $ 1,592 million in 2012"},
        {"source": "table", "text": "net sales | $ 1,200 | $ 1,592"},
    ],
    "program": "(1592 - 1200) / 1200",
    "answer": 0.3267,
}
ANSWER = Fraction(392, 1200)


@pytest.fixture
def found(find):
    def run(reply, gate=False, **params):
        params = {"sources": REPORT, "answer": float(ANSWER)} | params
        check = Check(kind="citations", params=params, gate=gate)
        return find(citations, check, reply if isinstance(reply, str) else json.dumps(reply))

    return run


def test_an_answer_that_follows_from_what_is_quoted_is_paid(found):
    assert found(GROWTH).value == 1.0
    assert found(GROWTH | {"answer": "32.67%"}).value == 1.0
    assert found(GROWTH | {"program": "subtract(1592, 1200), divide(#0, 1200)"}).value == 1.0
    assert found(f"```json\n{json.dumps(GROWTH)}\n```", where="block").value == 1.0
    assert found(GROWTH, answer="0.32667").value == 1.0


def quoted(*texts, source="page 1", **more):
    return GROWTH | {"quotes": [{"source": source, "text": text} for text in texts]} | more


REFUSED = {
    "nothing": ("{}", "wanted an object"),
    "no JSON": ("0.3267", "wanted an object"),
    "prose": ("It is 0.3267.", "no JSON"),
    "a key too many": (GROWTH | {"why": "so"}, "wanted an object"),
    "no quotations": (quoted(), "no quotations"),
    "another source": (quoted("Revenue rose to $ 1,592 million", source="page 2"), "no source"),
    "not verbatim": (quoted("Revenue grew to $ 1,592 million in 2012"), "not in 'page 1'"),
    "from two places": (quoted("Revenue rose to $ 1,592 million from"), "not in 'page 1'"),
    "of two rows": (quoted("2011 | 2012 | net sales", source="table"), "not in 'table'"),
    "a bare number": (quoted("1,592"), "fewer than 3 words"),
    "part of a number": (quoted("592 million in 2012", "to $ 1,5"), "not in 'page 1'"),
    "part of a word": (quoted("evenue rose to $ 1,592"), "not in 'page 1'"),
    "an operand that is not quoted": (quoted("rose to $ 1,592 million"), "1200 stands in no"),
    "another operand": (GROWTH | {"program": "(1592 - 1201) / 1201"}, "1201 stands in no"),
    "another program": (GROWTH | {"program": "1592 / 1200"}, "the program gives 1.32667"),
    "another answer": (GROWTH | {"answer": 0.4}, "the answer is 0.4"),
    "another question": (GROWTH | {"program": "1592 - 1200", "answer": 392}, "another answer: 392"),
    "no operand": (GROWTH | {"program": "1 / 3", "answer": 0.3333}, "nothing that is quoted"),
    "constants": (GROWTH | {"program": "1592 + 5 * 10 * 10 * 10 + 3"}, "5 constants"),
    "an operand for show": (GROWTH | {"program": "1592 - 1592 + 3 / 9", "answer": 0.3333},
                            "1592 makes no difference"),
    "an operand that hardly counts": (
        GROWTH | {"program": "3 / 9 - 1592 / (1000000 * 1000000)", "answer": 0.3333},
        "what is quoted makes hardly a difference"),
    "code": (GROWTH | {"program": "__import__('os')"}, "odd at"),
    "no number": (GROWTH | {"answer": "a third"}, "the answer is 'a third'"),
    "true": (GROWTH | {"answer": True}, "wanted text or a number"),
    "twice an answer": (json.dumps(GROWTH)[:-1] + ', "answer": 0.3267}', "stands twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_support_its_answer_pays_0(name, found):
    reply, told = REFUSED[name]
    result = found(reply)
    assert result.value == 0.0
    assert told in result.evidence["refused"], result.evidence


def test_quotations_are_compared_without_typography(found):
    text = 'Revenue rose  to\n$ 1,592 million in 2012, from "1 200 million" a year before.'
    assert found(quoted(text, program="1592 * 200", answer=318400), answer=318400).value == 1.0
    dashes = quoted("was pleased - margins fell by 3.5%.", program="3.5% * 2", answer="7%")
    assert found(dashes, answer="0.07").value == 1.0
    assert normalised("ﬁrst\u00ad line") == "first line"


def test_all_that_is_quoted_is_bounded(found):
    size = sum(len(normalised(quote["text"])) for quote in GROWTH["quotes"])
    assert found(GROWTH, max_chars=size - 1).value == 0.0
    assert found(GROWTH, max_chars=size).value == 1.0


def test_rows_are_quoted_whole_and_folded(found):
    reply = {
        "quotes": [{"source": "table", "text": "other ( 1 ) | (40) | 25"}],
        "program": "table_sum(other ( 1 ), none)",
        "answer": -15,
    }
    assert found(reply, answer=-15).value == 1.0
    reply["quotes"] = [{"source": "table", "text": "other ( 1 ) | (40)"}]
    assert found(reply, answer=-15).value == 0.0


def test_a_comparison_is_answered_with_yes_or_no(found):
    reply = GROWTH | {"program": "greater(1592, 1200)", "answer": "Yes"}
    assert found(reply, answer="yes").value == 1.0
    assert found(reply | {"answer": "no"}, answer="no").value == 0.0


def test_an_answer_in_words_stands_in_a_quotation(found):
    reply = {"quotes": [{"source": "page 1", "text": "The board, as ever, was pleased"}],
             "answer": "Pleased"}  # fmt: skip
    assert found(reply, computed=False, answer="pleased").value == 1.0
    assert found(reply | {"answer": "please"}, computed=False, answer="please").value == 0.0
    assert found(reply | {"program": "1"}, computed=False, answer="pleased").value == 0.0


def test_a_number_stands_in_a_quotation_however_it_is_written(found):
    reply = {"quotes": [{"source": "page 1", "text": GROWTH["quotes"][0]["text"]}], "answer": 1592}
    assert found(reply, computed=False, answer=1592).value == 1.0
    assert found(reply | {"answer": 1592.0}, computed=False, answer=1592).value == 1.0
    assert found(reply | {"answer": 592}, computed=False, answer=592).value == 0.0


def test_without_a_gold_answer_it_is_a_gate_only(find):
    check = Check(kind="citations", params={"sources": REPORT}, gate=True)
    assert find(citations, check, json.dumps(GROWTH)).value == 1.0
    with pytest.raises(UsageError, match="pays any answer"):
        find(citations, Check(kind="citations", params={"sources": REPORT}), json.dumps(GROWTH))


@pytest.mark.parametrize(
    "params",
    [{"sources": {}}, {"sources": {"a": []}}, {"sources": {"a": [[1]]}}, {"sources": "text"},
     {"answer": True}, {"answer": [1]}, {"answer": ""}, {"relative": "1%"}, {"relative": 1},
     {"absolute": -1},
     {"constants": ["1"]}, {"max_chars": 0}, {"computed": "no"}, {"source": {}}],
)  # fmt: skip
def test_what_a_task_declares_wrongly_is_its_mistake(params, found):
    with pytest.raises(UsageError):
        found(GROWTH, **params)


def test_numbers_are_read_as_reports_write_them():
    assert numbers("$ 1,592 ( 40 ) -7 5% 2012-2016 .5 1.2.3 v2 31-dec-2012") == {
        Fraction(n) for n in ("1592", "40", "-40", "-7", "5", "0.05", "2012", "2016", "0.5", "31")
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=5,
)  # fmt: skip
SIGNS = ["1592", "1200", "-", "+", "^", "/", "(", ")", "*", "9" * 400, "%", "#0", ",", "exp(",
         "greater(", "const_100", ".5", "٣", "0"]  # fmt: skip
TOKENS = st.lists(st.sampled_from(SIGNS), max_size=12)
ODD = st.one_of(
    JSON,
    st.fixed_dictionaries({"quotes": JSON, "program": JSON, "answer": JSON}),
    st.fixed_dictionaries({"quotes": st.just(GROWTH["quotes"]), "answer": JSON,
                           "program": TOKENS.map(" ".join)}),
)  # fmt: skip


@settings(max_examples=300)
@given(ODD)
def test_whatever_is_handed_in_is_judged(given_value):
    """What raises here a policy could choose over reward 0."""
    terms = module._terms(Check(kind="citations", params={"sources": REPORT, "answer": 7}))
    with contextlib.suppress(Unreadable, NoProgram, module._Refused):
        module._supported(documents.json_value(json.dumps(given_value)), terms)


@pytest.mark.parametrize("program", ["9" * 900, "1592" + " + 1592" * 130, "-" * 900 + "1",
                                     "1592 * " + "9" * 300 + " * " + "9" * 300])  # fmt: skip
def test_a_large_program_is_refused(program, found):
    assert found(GROWTH | {"program": program}).value == 0.0


# --- real questions -------------------------------------------------------------------------------

FINQA = Path(__file__).parents[3] / "shared" / "data" / "finqa"
MUTATED = 5
"""One in so many replies is mutated; all of them give the same, in 8 s."""
LITERAL = re.compile(r"(?<![\w#.])-?[\d.]+%?")
NAMED = re.compile(r"table_\w+\((.*?), none\)|const_\w+|#\d+")


def executed(program, table):
    """Value of a FinQA program by an interpreter of its own, in floating point."""
    done = []
    for name, inside in re.findall(r"(\w+)\(((?:[^()]|\([^()]*\))*)\)", program):
        if name.startswith("table_"):
            row = next(row for row in table if row[0].strip() == inside.rpartition(",")[0].strip())
            cells = [re.search(r"(-?\s?[\d,]*\.?\d+)(\s*%)?", cell) for cell in row[1:]]
            values = [float(c[1].replace(",", "").replace(" ", "")) / (100 if c[2] else 1)
                      for c in cells if c]  # fmt: skip
            folds = {"sum": sum, "max": max, "min": min, "average": lambda v: sum(v) / len(v)}
            done.append(folds[name[6:]](values))
            continue
        one, other = (operand(text.strip(), done) for text in inside.split(","))
        done.append(
            {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "exp": lambda a, b: a**b,
             "multiply": lambda a, b: a * b, "divide": lambda a, b: a / b,
             "greater": lambda a, b: "yes" if a > b else "no"}[name](one, other)
        )  # fmt: skip
    return done[-1]


def operand(text, done):
    if text.startswith("#"):
        return done[int(text[1:])]
    number = text.removeprefix("const_").replace("m", "-")
    return float(number.rstrip("%")) / (100 if text.endswith("%") else 1)


def answered(item):
    """A reply that quotes a fact or row for each operand, and whether there is one for each."""
    places = [{"source": "facts", "text": text} for text in item["facts"]]
    places += [{"source": "table", "text": " | ".join(row)} for row in item["table"]]
    known = [numbers(normalised(place["text"])) for place in places]
    quotes, complete = [], True
    for row in re.findall(r"table_\w+\((.*?), none\)", item["program"]):
        quotes += [p for p in places if p["source"] == "table"
                   and p["text"].split(" | ")[0].strip() == row][:1]  # fmt: skip
    for literal in LITERAL.findall(NAMED.sub("", item["program"])):
        value = Fraction(literal.rstrip("%")) / (100 if literal.endswith("%") else 1)
        holding = [place for place, some in zip(places, known, strict=True)
                   if {value, -value} & some]  # fmt: skip
        complete &= bool(holding)
        quotes += [place for place in holding[:1] if place not in quotes]
    value = executed(item["program"], item["table"])
    shown = value if isinstance(value, str) else float(f"{value:.8g}")
    return {"quotes": quotes, "program": item["program"], "answer": shown}, complete


def mutants(reply):
    """Replies that are wrong in one way, by name."""
    first, *rest = reply["quotes"]
    words = first["text"].split()
    middle = len(words) // 2
    other = " ".join([*words[:middle], "roughly", *words[middle:]])
    yield "a word more", reply | {"quotes": [first | {"text": other}, *rest]}
    source = {"facts": "table", "table": "facts"}[first["source"]]
    yield "another source", reply | {"quotes": [first | {"source": source}, *rest]}
    if isinstance(reply["answer"], str):
        yield "the other answer", reply | {"answer": "no" if reply["answer"] == "yes" else "yes"}
    else:
        last = reply["program"].count("), ")
        twice = f"{reply['program']}, multiply(#{last}, const_2)"
        yield "an answer beside it", reply | {"answer": reply["answer"] * 1.01 or 1}
        yield "a program beside it", reply | {"program": twice}
    literal = LITERAL.search(NAMED.sub("", reply["program"]))
    if literal:
        strange = reply["program"].replace(literal[0], "987654.25", 1)
        yield "an operand from nowhere", reply | {"program": strange}


@pytest.mark.skipif(not FINQA.exists(), reason="no shared data")
def test_answers_to_questions_on_real_reports_are_paid_and_mutants_are_not(found):
    """2,030 questions of FinQA with the program of their authors. Not paid: 39 whose operands were
    not among the facts that were retrieved, 4 that only calculate with constants, and 17 with an
    operand that makes no difference (`subtract(62%, 62%)`).
    """
    told, caught = Counter(), Counter()
    for name in ("finqa_dev_facts", "finqa_test_facts"):
        for line in gzip.decompress((FINQA / f"{name}.jsonl.gz").read_bytes()).splitlines():
            item = json.loads(line)
            reply, complete = answered(item)
            gold = {"sources": {k: item[k] for k in ("facts", "table")}, "answer": reply["answer"]}
            result = found(reply, **gold)
            if result.value == 1.0:
                told["paid"] += 1
                for mutation, mutant in mutants(reply) if told["paid"] % MUTATED == 0 else ():
                    caught[mutation, found(mutant, **gold).value] += 1
            elif not complete:
                told["incomplete"] += 1
            else:
                told[re.sub(r"operand [\d.e+]+", "operand", result.evidence["refused"])] += 1
    assert told == {"paid": 1970, "incomplete": 39, "no quotations": 4,
                    "the operand makes no difference": 17}  # fmt: skip
    assert not [key for key in caught if key[1] != 0.0]
    assert len(caught) == 6, caught
