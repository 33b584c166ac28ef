"""The suite as a whole: how many, which entries of the catalogue, and on the page as it is."""

from pathlib import Path

from tests.verify.attacks import table


def test_the_page_says_of_the_attacks_what_the_suite_has():
    """After a change: python -m tests.verify.attacks.table."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


def test_every_entry_of_the_catalogue_is_tried_or_explained():
    attacks = [attack for family in table.families().values() for attack in family]
    assert len({attack.name for attack in attacks}) == len(attacks) >= 40
    assert {attack.entry for attack in attacks} | set(table.ELSEWHERE) == set(range(1, 51))
    kinds = {attack.kind for attack in attacks}
    assert kinds == {"suite", "differential", "stdio", "program", "state", "exact", "numeric",
                     "math", "choice", "judge", "json_schema", "text", "citations", "tool_calls",
                     "final_state", "geometry"}  # fmt: skip


def test_no_family_is_forgotten():
    files = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert files == {f"test_{name}" for name in table.FAMILIES} | {"test_table"}
