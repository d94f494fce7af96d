"""A recorded host ends in its first state after any order of applies, crashes and releases."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_host import PROFILES, Crash
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import RecordedHost

from sidekick.apply import ApplyRun
from sidekick.record import Target

LIVE = sorted(path.stem for path in PROFILES.glob("*.toml") if path.stem != "batch")


@pytest.fixture(scope="module", autouse=True)
def _folders_that_go_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("hosts")))
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.mark.behaviour("F-65", "F-73")
@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["amd", "debian-12", "vm"]),
    st.lists(st.tuples(st.sampled_from(LIVE), st.integers(0, 60)), min_size=1, max_size=4),
)
def test_any_history_of_shipped_profiles_leaves_no_trace(
    name: str, history: list[tuple[str, int]]
) -> None:
    fake = RecordedHost(Path(tempfile.mkdtemp()), name)
    before = fake.everything()
    for profile, crash in history:
        fake.points.at = fake.points.passed + crash if crash else None
        with contextlib.suppress(Crash):
            ApplyRun(fake.host(), fake.state, fake.target(profile)).carry_out()
        fake.points.at = None
    ApplyRun(fake.host(), fake.state, Target(), command="rollback").carry_out()
    assert fake.everything() == before
    assert ApplyRun(fake.host(), fake.state, Target()).observation.plan.changes == ()
