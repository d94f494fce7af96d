"""The glossary's table, and what it must say about terms of other systems."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"


def rows() -> list[tuple[str, ...]]:
    """Return the cells of each line of the table below its head."""
    table = GLOSSARY.read_text().partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert cells[0] == ("say", "meaning", "elsewhere", "where")
    assert set(cells[1]) == {"---"}
    return cells[2:]


def test_each_row_has_a_word_a_meaning_an_equivalent_and_a_file() -> None:
    assert {len(row) for row in rows()} == {4}
    assert all(cell for row in rows() for cell in row)
    assert max(Counter(row[0] for row in rows()).values()) == 1


def test_each_word_is_found_in_the_file_that_it_names() -> None:
    """A reader who looks up a word opens that file and finds the word there."""
    missing = []
    for words, _, _, where in rows():
        file = re.fullmatch(r"\[(\S+)\]\(\.\./\1\)", where)
        assert file, f"{words}: {where}"
        path = ROOT / file[1]
        text = path.read_text().lower() if path.is_file() else ""
        missing += [
            f"{word}: {file[1]}"
            for word in re.split(r",? / |, ", words)
            if re.sub(r"\W", "", word.lower()) not in re.sub(r"[\W_]", "", text)
        ]
    assert missing == []


@pytest.mark.behaviour("MO20")
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
    elsewhere = {row[0]: row[2].split("; ") for row in rows()}
    assert in_kubernetes in elsewhere[word]
