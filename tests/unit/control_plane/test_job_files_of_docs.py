"""The job files of docs/compose.md are valid. tests/lab/test_4_compose.py applies them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.api import NetworkMode
from control_plane.cli.jobfile import read_job

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compose.md"


@pytest.mark.behaviour("BUG-AG31")
def test_the_three_jobs_are_valid_and_let_one_another_in(tmp_path: Path) -> None:
    """They permit each other by job name, and the resolver uses the same names."""
    found = {}
    files = re.findall(r"```toml\n# (\w+)\.toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, text in files:
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        found[name] = read_job(file, (), lambda: dict.fromkeys(IMAGES, f"sha256:{'1' * 64}"))
    assert list(found) == ["db", "app", "web"]
    for name, job in found.items():
        assert (job.name, job.network.mode) == (name, NetworkMode.PRIVATE)
    assert [found[name].network.allow_from for name in found] == [["app"], ["web"], []]
    assert 'host="db.twine"' in found["app"].configuration["app.py"]
    assert "set $app app.twine;" in found["web"].configuration["nginx.conf"]


IMAGES = ("postgres:17", "python-postgres:3", "nginx:1")
