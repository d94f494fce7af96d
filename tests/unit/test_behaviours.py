"""docs/behaviours.md and the tests agree: every id has a row, and every row has a test."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/behaviours"))
PAGE = TOOL["PAGE"].read_text()


def test_every_id_that_a_test_names_has_a_row_with_a_sentence() -> None:
    rows = TOOL["rows"](PAGE)
    missing = sorted(i for i in TOOL["named"]() if not rows.get(i, ("", ""))[0])
    assert missing == [], "write their sentences into docs/behaviours.md"


def test_every_row_is_shown_by_a_test() -> None:
    assert sorted(TOOL["rows"](PAGE).keys() - TOOL["named"]().keys()) == []


def test_an_id_belongs_to_the_test_that_it_stands_in_or_above() -> None:
    owners = TOOL["_owners"](
        '"""Of all."""\n# of one\n@mark  # one, too\ndef test_one():\n    """Of it."""\n\n\nx = 1\n'
    )
    assert owners == dict.fromkeys((2, 3, 4, 5), "test_one")


def test_the_report_lists_each_id_with_its_tests() -> None:
    page = "# T\n\n## Behaviours\n| AL2 | Fits. | 2.3 |\n| F-46 | A cut. | — |\n"
    report = TOOL["report"](page, {"AL2": ["b", "c"]})
    assert "**AL2** (2.3) Fits.\n- `b`\n- `c`\n\n**F-46** (—) A cut.\n" in report
