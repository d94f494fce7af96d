"""docs/behaviours.md and the tests agree: every id has a row, and every row has a test."""

import ast
import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/behaviours"))
PAGE = TOOL["PAGE"].read_text()


def test_every_id_that_a_test_is_marked_with_has_a_row_with_a_sentence() -> None:
    rows = TOOL["rows"](PAGE)
    missing = sorted(i for i in TOOL["named"]() if not rows.get(i, ("", ""))[0])
    assert missing == [], "write their sentences into docs/behaviours.md"


def test_every_row_is_shown_by_a_test() -> None:
    assert sorted(TOOL["rows"](PAGE).keys() - TOOL["named"]().keys()) == []


def test_no_docstring_or_comment_names_an_id_in_place_of_a_marker() -> None:
    assert TOOL["unmarked"]() == [], "write @pytest.mark.behaviour(…) above the test"


def test_markers_of_functions_classes_and_modules_are_read() -> None:
    source = (
        'pytestmark = [pytest.mark.root, pytest.mark.behaviour("AL1", "F-01")]\n'
        '@pytest.mark.behaviour("AL2")\n@pytest.mark.root\nasync def test_one(): ...\n'
        '@pytest.mark.behaviour("AL3")\nclass TestAll:\n'
        '    @pytest.mark.behaviour("BUG-CP7")\n    def test_two(self): ...\n'
    )
    assert list(TOOL["marked"](ast.parse(source).body)) == [
        ("", "AL1"),
        ("", "F-01"),
        ("test_one", "AL2"),
        ("TestAll", "AL3"),
        ("test_two", "BUG-CP7"),
    ]


def test_the_report_lists_each_id_with_its_tests() -> None:
    page = "# T\n\n## Behaviours\n| AL2 | Fits. | 2.3 |\n| F-46 | A cut. | — |\n"
    report = TOOL["report"](page, {"AL2": ["b", "c"]})
    assert "**AL2** (2.3) Fits.\n- `b`\n- `c`\n\n**F-46** (—) A cut.\n" in report
