"""Each test asserts something, itself or in the functions and fixtures that it uses."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FUNCTION = re.compile(r"^( *)(?:async )?def (\w+)\((.*?)^\1\S", re.MULTILINE | re.DOTALL)
"""Matches a function up to the next line with its indentation. Nested functions are part of it."""
WORD = re.compile(r"\w+")
FAILS = {"assert", "raise", "raises", "fail", "warns"}
"""Words that end a test: of Python and of pytest."""


def functions(text: str) -> Iterable[tuple[str, set[str]]]:
    """Yield each function and the words in it, including the words of nested functions."""
    at, text = 0, text.replace("\n)", "\n    )") + "\nend"
    while found := FUNCTION.search(text, at):
        yield found[2], set(WORD.findall(found[3]))
        at = found.start() + len(found[1]) + len("def ")


def that_cannot_fail(texts: dict[str, str]) -> list[str]:
    """Return tests that cannot fail: neither they nor the functions that they use assert or
    raise."""
    words: dict[str, set[str]] = defaultdict(set)
    tests = []
    for path, text in texts.items():
        for name, body in functions(text):
            words[name] |= body
            if name.startswith("test_"):
                tests.append((path, name, body))
    can = set(FAILS)
    while more := {name for name, body in words.items() if name not in can and body & can}:
        can |= more
    return [f"{path}: {name}" for path, name, body in tests if not body & can]


@pytest.mark.behaviour("BUG-AU5")
def test_each_test_can_fail() -> None:
    """Asserts in helpers and in the teardown of fixtures count as well."""
    paths = {path for path in TESTS.rglob("*.py") if "data" not in path.parts} - {Path(__file__)}
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in paths}
    assert sum(name.startswith("test_") for t in texts.values() for name, _ in functions(t)) > 3000
    assert that_cannot_fail(texts) == []


def test_a_test_that_only_calls_is_found() -> None:
    text = """\
def helper():
    return 1

def checked(
    value,
):
    if value:
        assert value

def test_a(helper):
    helper()

async def test_b():
    checked(1)
"""
    assert that_cannot_fail({"test_x.py": text}) == ["test_x.py: test_a"]
