"""Fixtures of sidekick's tests: a host in a folder, which never starts a real program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fake_host import FakeHost


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a unit test started {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def fake(tmp_path: Path) -> FakeHost:
    """A host with 1 GiB, one CPU and Debian's cloud kernel."""
    return FakeHost(tmp_path)
