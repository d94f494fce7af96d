"""Roots of tasks: what is written down beside a snapshot."""

from __future__ import annotations

import os
import time

import pytest
from builders import IMAGE, FakeHost

from agent.services.roots import Roots


def test_the_use_of_an_image_is_written_down_once_a_minute(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = host.state / "images" / f"{IMAGE.removeprefix('sha256:')}.json"
    roots = Roots(host.fake.btrfs, host.state / "tasks", host.state / "images")
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def used_after(passed_s: float, task_id: str) -> bool:
        nonlocal now_s
        now_s += passed_s
        os.utime(described, (1, 1))
        roots.prepare(task_id, IMAGE)
        return described.stat().st_mtime > 1

    assert used_after(0, "a")
    assert not used_after(1, "b")
    assert not used_after(58, "c")
    assert used_after(1, "d")
    assert not used_after(1, "e")
