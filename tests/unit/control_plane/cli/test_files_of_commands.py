"""Files that commands other than `job apply` read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from control_plane.cli.shards import shards
from wire.errors import InvalidInput


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"a": [0], "a": [1]}', "'a' is written twice"),
        ('{"a": [0]}, "expect": 1', "Extra data"),
        ("", "line 1 column 1"),
    ],
)
def test_a_shard_map_that_says_two_things_is_refused(
    tmp_path: Path, content: str, told: str
) -> None:
    """BUG-UX92: the last of two equal keys won, and errors named places of another text."""
    file = tmp_path / "map.json"
    file.write_text(content)
    asked: list[Any] = []
    found = CliRunner().invoke(
        shards, ["web", "--set", str(file)], obj=SimpleNamespace(ask=asked.append)
    )
    assert isinstance(found.exception, InvalidInput)
    assert told in str(found.exception)
    assert asked == []
