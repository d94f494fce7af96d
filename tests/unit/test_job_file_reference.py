"""docs/job-file.md and the types agree, and every key has a description."""

import re
import runpy
from pathlib import Path

import pytest

from sidekick.tuned import REASONS

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/references"))
PAGE = TOOL["PAGE"].read_text()


def test_the_page_matches_the_types() -> None:
    assert TOOL["written"]() == PAGE, "run tools/references"


@pytest.mark.behaviour("BUG-SK20")
def test_the_page_of_tuned_plugins_matches_the_code() -> None:
    """Each plugin of TuneD has a line, converted or with a reason."""
    page = TOOL["TUNED_PAGE"].read_text()
    assert TOOL["written_tuned"]() == page, "run tools/references"
    rows = [re.split(r"(?<!\\) \| ", line) for line in page.splitlines() if line.startswith("| `[")]
    assert [row for row in rows if not row[-1].strip("| ")] == []
    assert {f"| `[{name}]`" for name in REASONS} <= {row[0] for row in rows}


def test_every_key_has_a_description() -> None:
    rows = [re.split(r"(?<!\\) \| ", line) for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if not row[-1].strip("| ")] == []


def test_every_referenced_table_exists() -> None:
    headings = {h.lower() for h in re.findall(r"^### (\w+)$", PAGE, flags=re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", PAGE)) <= headings
