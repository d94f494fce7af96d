"""TOML texts that would take its parser long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.jobfile import read_document
from control_plane.profiles.core.proposal import check_text
from wire.config_file import read_toml
from wire.errors import TwineError
from wire.toml_limits import find_excess, parse_toml

DEEP = [
    ".".join(["a"] * 40) + " = 1",
    "[" + " . ".join(["a"] * 40) + "]",
    "x = {" + ".".join(["a"] * 40) + " = 1}",
    ".".join(['"a.b"', "'c'"] * 20) + " = 1",
]


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> Any:
        raise AssertionError(text)

    monkeypatch.setattr("tomllib.loads", fail)


@pytest.mark.behaviour("BUG-UX164")
@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize("text", DEEP)
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(text: str, tmp_path: Path) -> None:
    """Regression: the parser takes quadratic time for such a key."""
    file = tmp_path / "job.toml"
    file.write_text(text)
    for read in (read_document, read_toml):
        with pytest.raises(TwineError, match="nested deeper than 32"):
            read(file)
    assert "nested deeper than 32" in check_text(text, "web", [])[0].reason


@pytest.mark.behaviour("BUG-UX164")
@pytest.mark.parametrize(
    "text",
    [
        "a.b.c = 1.5",
        "name = '" + ".".join(["1"] * 34) + ".ip6.arpa'",
        'zone = """\n' + ".".join(["1"] * 34) + '.ip6.arpa. PTR x"""',
        "# " + ".".join(["a"] * 40),
    ],
)
def test_texts_and_comments_have_as_many_dots_as_they_like(text: str) -> None:
    assert find_excess(text) is None
    parse_toml(text)
