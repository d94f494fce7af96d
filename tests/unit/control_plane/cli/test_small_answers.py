"""What commands print of empty answers, and which of their options are refused."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from control_plane.cli import main, pipeline
from conveyor.runs import RunHistory


def test_a_pipeline_without_runs_has_a_history_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUG-UX113: `pipeline history` of a pipeline without runs printed nothing."""
    monkeypatch.setattr(pipeline, "_ask", lambda *_: RunHistory(runs=[]))
    found = CliRunner().invoke(main, ["pipeline", "history", "web"])
    assert (found.exit_code, found.stdout) == (0, "pipeline web has no run yet\n")
