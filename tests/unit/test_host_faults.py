"""Every fault that concerns a host has a test, or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
IDS = {f"F-{n:02}" for n in (*range(1, 43), *range(76, 90))}


def test_each_fault_of_a_host_is_shown_or_excused() -> None:
    def listed(page: str) -> set[str]:
        text = (DOCS / page).read_text()
        return set(re.findall(r"^\| (F-\d\d) \| (?!\|)", text, re.MULTILINE)) & IDS

    shown, excused = listed("behaviours.md"), listed("host-faults.md")
    assert IDS - shown - excused == set()
