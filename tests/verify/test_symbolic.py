import pytest

from posttrain.verify import symbolic


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("{4,9}", "9", False), ("{4,9}", "9 and 4", True), ("n=2,3,4", "n=1,2,3", False),
        (r"\pm 5", "5", False), ("1/3^{80}", "1/3^{81}", False),
        ("2x-5y+1=0", "2x+7y+9=0", False), ("2x+4y=6", "y=(3-x)/2", True),
        ("(0,1)", "(0,1.5)", False), ("4", r"4\sqrt{2}", False), ("x=x", "5", False),
        (r"\frac{3}{\sqrt{2}}", r"\frac{3\sqrt{2}}{2}", True),
    ],
)  # fmt: skip
def test_equality_is_neither_lenient_nor_formal_BR_30(gold, answer, right):
    if gold == "x=x":
        with pytest.raises(ValueError, match="gold"):
            symbolic.same(gold, answer)
    else:
        assert symbolic.same(gold, answer) is right


def test_what_cannot_be_parsed_is_equal_to_nothing():
    assert not symbolic.same("x", "5 }")
    with pytest.raises(ValueError, match="gold"):
        symbolic.same("5 }", "5 }")
