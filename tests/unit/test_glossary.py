"""The glossary's table, and what it must say of other systems' words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

GLOSSARY = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def rows() -> list[tuple[str, ...]]:
    """Return the cells of each line of the table below its head: say, meaning, elsewhere."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert cells[0] == ("say", "meaning", "elsewhere")
    assert set(cells[1]) == {"---"}
    return cells[2:]


def test_each_line_has_a_word_a_meaning_and_what_others_say() -> None:
    assert {len(row) for row in rows()} == {3}
    assert all(cell for row in rows() for cell in row)
    assert max(Counter(row[0] for row in rows()).values()) == 1


@pytest.mark.parametrize(
    ("word", "in_kubernetes"),
    [
        ("scheduler", "Kubernetes: controllers"),
        ("allocator", "Kubernetes: scheduler"),
        ("agent", "kubelet"),
        ("job", "Kubernetes: Deployment"),
        ("task", "Kubernetes: Pod"),
    ],
)
def test_the_papers_words_are_mapped_to_those_of_kubernetes(word: str, in_kubernetes: str) -> None:
    """MO20."""
    elsewhere = {row[0]: row[2].split("; ") for row in rows()}
    assert in_kubernetes in elsewhere[word]
