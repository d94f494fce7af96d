"""docs/job-file.md and the types say the same, and every key says what it is."""

import re
import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/references"))
PAGE = TOOL["PAGE"].read_text()


def test_the_page_is_what_the_types_say() -> None:
    assert TOOL["written"]() == PAGE, "run tools/references"


def test_every_key_says_what_it_is() -> None:
    rows = [re.split(r"(?<!\\) \| ", line) for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if not row[-1].strip("| ")] == []


def test_every_table_that_is_named_is_there() -> None:
    headings = {h.lower() for h in re.findall(r"^### (\w+)$", PAGE, flags=re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", PAGE)) <= headings
