"""Fixtures of the agent's tests: a machine in memory, whose pauses are short."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import FakeHost

from agent.api import ProbeKind
from agent.tasks import prober, supervisor
from agent.tasks.core import restarts


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """Yield a machine that has one image."""
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)
    monkeypatch.setattr(supervisor, "CONFLICT_S", 0.01)
    monkeypatch.setattr(restarts, "LEAST_MAX_S", 0.0)
    monkeypatch.setattr(prober, "MIN_PAUSE_S", dict.fromkeys(ProbeKind, 0.0))
    host = FakeHost(tmp_path)
    host.give_image()
    return host
