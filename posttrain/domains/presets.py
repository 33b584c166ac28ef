"""Easy settings of reasoning-gym generators, for models of about 135 M parameters.

Ten of them were screened with such a model: with the answer prefix it is right on 5 % or more of
them before training; the others are their neighbours, not screened. They are plain values:
catalogue names that stand for a source and its parameters. The one thing that must stay true: each
has 128 distinct held-out tasks or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.core.task import Json

FAMILY = "easy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named parameterisation of a catalogue domain; one table of parameters a level."""

    source: str
    params: tuple[Mapping[str, Json], ...]


def _gym(generator: str, *params: Mapping[str, Json]) -> Preset:
    return Preset(source=f"reasoning_gym.{generator}", params=params)


def _plus_minus(digits: int, terms: int = 2) -> Mapping[str, Json]:
    return {
        "min_terms": 2,
        "max_terms": terms,
        "min_digits": 1,
        "max_digits": digits,
        "operators": ["+", "-"],
        "allow_parentheses": False,
        "allow_negation": False,
    }


def _terms(terms: int, digits: int) -> Mapping[str, Json]:
    return {"min_terms": 2, "max_terms": terms, "min_digits": 1, "max_digits": digits}


PRESETS: Mapping[str, Preset] = {
    "basic_arithmetic": _gym("basic_arithmetic", _plus_minus(2), _plus_minus(2, 3)),
    "chain_sum": _gym("chain_sum", _terms(3, 1), _terms(3, 2)),
    "products": _gym("products", _terms(2, 2)),
    "gcd": _gym("gcd", {"min_value": 1, "max_value": 50}, {"min_value": 1, "max_value": 200}),
    "lcm": _gym("lcm", {"min_value": 1, "max_value": 30}, {"min_value": 1, "max_value": 60}),
    "letter_counting": _gym("letter_counting", {"min_words": 5, "max_words": 15}),
    "fraction_simplification": _gym(
        "fraction_simplification",
        {"min_value": 1, "max_value": 20, "min_factor": 2, "max_factor": 9, "styles": ["plain"]},
    ),
    "syllogism": _gym("syllogism", {}),
    "isomorphic_strings": _gym(
        "isomorphic_strings", {"min_string_length": 2, "max_string_length": 5}
    ),
    "ransom_note": _gym(
        "ransom_note",
        {"min_note_length": 1, "max_note_length": 4, "min_magazine_length": 2}
        | {"max_magazine_length": 8},
    ),
    "aiw": _gym("aiw", {"max_entities": 4}),
    "spell_backward": _gym("spell_backward", {"min_word_len": 3, "max_word_len": 5}),
    "decimal_chain_sum": _gym(
        "decimal_chain_sum",
        {**_terms(2, 1), "min_decimal_places": 1, "max_decimal_places": 1},
    ),
    "count_bits": _gym("count_bits", {"min_n": 1, "max_n": 1023}),
    "leg_counting": _gym(
        "leg_counting",
        {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 5},
    ),
    "number_sorting": _gym(
        "number_sorting",
        {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0}
        | {"min_value": 0.0, "max_value": 99.0},
    ),
    "word_sorting": _gym("word_sorting", {"min_words": 3, "max_words": 4, "max_word_length": 6}),
    "simple_equations": _gym(
        "simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20},
    ),
}
"""Preset → what it stands for; in the catalogue as `easy.<preset>`."""
