"""docs/behaviours.md and the tests say the same: every id can be looked up, every row is shown."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/behaviours"))
PAGE = TOOL["PAGE"].read_text()


def test_every_id_that_a_test_names_has_a_row_with_a_sentence() -> None:
    rows = TOOL["rows"](PAGE)
    missing = sorted(i for i in TOOL["named"]() if not rows.get(i, ("", ""))[0])
    assert missing == [], "run tools/behaviours and write their sentences"


def test_every_row_is_shown_by_a_test() -> None:
    assert sorted(TOOL["rows"](PAGE).keys() - TOOL["named"]().keys()) == []


def test_the_page_names_the_tests_as_they_are_now() -> None:
    assert TOOL["written"](PAGE, TOOL["named"]()) == PAGE, "run tools/behaviours"


def test_an_id_belongs_to_the_test_that_it_stands_in_or_above() -> None:
    owners = TOOL["_owners"](
        '"""Of all."""\n# of one\n@mark  # one, too\ndef test_one():\n    """Of it."""\n\n\nx = 1\n'
    )
    assert owners == dict.fromkeys((2, 3, 4, 5), "test_one")


def test_a_new_id_gets_a_row_and_sentences_stay() -> None:
    page = TOOL["written"]("# T\n\n## Behaviours\n| AL2 | Old. | 2.3 | `x` |\n", {"AL2": ["b"]})
    page = TOOL["written"](
        page, {"AL2": ["b", "c"], "AL10": ["a"], "F-46": ["a"], "BUG-CP1": ["a"]}
    )
    assert "| AL2 | Old. | 2.3 | `b`<br>`c` |\n| AL10 |  | — | `a` |" in page
    assert TOOL["rows"](page).keys() == {"AL2", "AL10", "F-46", "BUG-CP1"}
