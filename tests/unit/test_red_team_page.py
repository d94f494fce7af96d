"""The page on security shows every probe of the task that attacks its host, and the result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.behaviour("F-84")
def test_the_security_page_shows_every_probe_and_no_success() -> None:
    """The table comes from a run of tests/lab/test_2_red_team.py."""
    source = (ROOT / "tests" / "lab" / "red_team.c").read_text()
    probes = re.findall(r'^ +P\("([^"]+)"', source, re.MULTILINE)
    page = (ROOT / "docs" / "security.md").read_text()
    _, _, below = page.partition("| it tries | and gets |\n|---|---|\n")
    rows = [line.strip("| ").split(" | ") for line in below.partition("\n\n")[0].splitlines()]
    assert [name for name, _ in rows] == probes
    assert len(probes) >= 40
    assert all(re.fullmatch("E[A-Z0-9]+", result) for _, result in rows)
