"""What is offered of reasoning-gym 0.1.25, and with which reservations: tables, no code.

Which curriculum levels were kept was measured: a level stays where it generates in under 0.7 s,
its prompt has at most about 4,000 characters and its answer at most 1,500; of more than five, five
evenly spread are kept. The one thing that must stay true: a generator that is not offered is
listed with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping

LEVELS: Mapping[str, tuple[int, ...]] = {
    "ab": (0, 1, 2, 3),
    "advanced_geometry": (0, 1, 2, 3),
    "aiw": (0, 2, 4, 6, 8),
    "arc_1d": (0, 1, 2, 3),
    "arc_agi": (0, 1, 2, 3),
    "base_conversion": (0, 1, 2, 3, 4),
    "basic_arithmetic": (0, 1, 2, 3, 4),
    "bf": (0, 1),
    "binary_alternation": (0, 1, 2, 3),
    "binary_matrix": (0, 1),
    "bitwise_arithmetic": (0, 2, 4, 7, 9),
    "caesar_cipher": (0, 1),
    "calendar_arithmetic": (0, 1, 2, 3),
    "chain_sum": (0, 2, 5, 8, 10),
    "circuit_logic": (0, 1),
    "codeio": (0, 1, 2, 3),
    "coin_flip": (0, 3, 6, 9, 12),
    "color_cube_rotation": (0, 1, 2),
    "complex_arithmetic": (0, 1, 2, 3),
    "count_bits": (0, 1, 2, 3, 4),
    "count_primes": (0, 1, 2, 3, 4),
    "countdown": (0, 1, 2),
    "course_schedule": (0, 1, 2, 3, 4),
    "cryptarithm": (0, 1, 2, 3),
    "decimal_arithmetic": (0, 1, 2, 3),
    "decimal_chain_sum": (0, 1, 2, 3, 4),
    "dice": (0, 1, 2, 3),
    "emoji_mystery": (0, 1, 2, 4, 5),
    "family_relationships": (0, 2, 4, 6, 8),
    "figlet_font": (0, 1, 2, 4, 5),
    "fraction_simplification": (0, 1, 2, 3),
    "futoshiki": (0, 1, 2),
    "game_of_life": (0, 1),
    "game_of_life_halting": (0, 1, 2, 3),
    "gcd": (0, 1, 2, 3),
    "graph_color": (0, 1, 2, 3),
    "group_anagrams": (0, 1),
    "intermediate_integration": (0, 2, 4, 5, 7),
    "isomorphic_strings": (0, 1, 2, 3),
    "jugs": (0, 1),
    "kakurasu": (0, 1, 2, 3),
    "knights_knaves": (0, 1, 2, 3),
    "largest_island": (0, 1, 2),
    "lcm": (0, 1, 2, 3),
    "leg_counting": (0, 9, 18, 26, 35),
    "letter_counting": (0, 2, 4, 5, 7),
    "letter_jumble": (0, 1, 2, 3, 4),
    "mahjong_puzzle": (0, 1),
    "manipulate_matrix": (0, 1),
    "maze": (0, 1),
    "mini_sudoku": (0, 1, 2, 3, 4),
    "modulo_grid": (0,),
    "n_queens": (0, 1, 2, 3),
    "needle_haystack": (0,),
    "number_filtering": (0, 1, 2),
    "number_format": (0, 1),
    "number_sequence": (0,),
    "number_sorting": (0,),
    "palindrome_generation": (0, 1, 2, 3),
    "palindrome_partitioning": (0, 1, 2),
    "path_star": (0, 1, 2, 3),
    "polynomial_equations": (0, 1, 2, 3),
    "polynomial_multiplication": (0, 1, 2),
    "pool_matrix": (0, 1, 2),
    "power_function": (0, 1, 2, 3, 4),
    "prime_factorization": (0, 1, 2, 3),
    "products": (0, 2, 5, 8, 10),
    "propositional_logic": (0, 1, 2, 3, 4),
    "puzzle24": (0, 2, 3, 4, 6),
    "quantum_lock": (0, 2, 4, 7, 9),
    "ransom_note": (0, 1, 2, 3),
    "rearc": (0, 2, 3, 4, 6),
    "rectangle_count": (0, 2, 4),
    "rotate_matrix": (0, 1),
    "rotten_oranges": (0, 1, 2),
    "rubiks_cube": (0,),
    "self_reference": (0, 2, 4, 7, 9),
    "sentence_reordering": (0, 1, 2, 3),
    "shortest_path": (0, 1),
    "simple_equations": (0, 1, 2, 3),
    "simple_geometry": (0, 1, 2, 3),
    "simple_integration": (0, 1, 2, 3),
    "sokoban": (1, 4, 7, 9, 12),
    "spell_backward": (0, 1, 2, 3, 4),
    "spiral_matrix": (0, 1),
    "string_insertion": (0, 1, 2, 3),
    "string_manipulation": (0, 1, 2, 3, 4),
    "string_splitting": (0, 1, 2, 3),
    "string_synthesis": (0, 1, 2, 3),
    "sudoku": (0, 1, 2, 3, 4),
    "survo": (0, 1),
    "syllogism": (0, 1, 2, 3),
    "time_intervals": (0, 2, 3, 4, 6),
    "tower_of_hanoi": (0, 1),
    "tsumego": (0, 1, 2, 3),
    "word_ladder": (0, 1, 2),
    "word_sequence_reversal": (0, 1, 2, 3),
    "word_sorting": (0, 1, 2, 3, 4),
    "zebra_puzzles": (0, 1, 2, 3),
}
"""Generator → the curriculum levels that are its levels here, easiest first."""

WITHOUT_CURRICULUM: frozenset[str] = frozenset(
    {"acre", "gsm_symbolic", "knight_swap", "list_functions"}
)
"""One level, the generator's defaults (knight_swap's curriculum breaks its own limits)."""

NOT_OFFERED: Mapping[str, str] = {
    "boxnet": "its data holds no solution, so there is no oracle",
    "composite": "it mixes other generators; the mixture of a run does that",
    "rush_hour": "its data holds no solution, so there is no oracle",
}
"""Generator → why it is not in the catalogue."""

EXAMPLE_KEYS: Mapping[str, str] = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Generators without a single gold answer → the metadata that holds one right answer."""

COMPARED: frozenset[str] = frozenset(
    {
        "figlet_font", "game_of_life_halting", "gsm_symbolic", "letter_jumble", "spell_backward",
        "word_sorting",
    }
)  # fmt: skip
"""Scored by comparing texts: their scorers pay for any text (`bool(answer)`), for the first number
in it, or for one that begins like the right one."""

READS_FILES: frozenset[str] = frozenset(
    {"arc_agi", "codeio", "figlet_font", "group_anagrams", "rearc", "spell_backward", "word_ladder"}
)
"""Made from data files at 40 to 370 ms each: one instance a setting is kept and given each seed in
turn, which was checked to yield the same entries as a new instance."""

READ_AS_PYTHON: frozenset[str] = frozenset(
    {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
)
"""Their scorers pass the answer to `eval`."""

READ_BY_SYMPY: frozenset[str] = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""Their scorers pass the answer to SymPy's `parse_expr`, which is `eval` in disguise."""
