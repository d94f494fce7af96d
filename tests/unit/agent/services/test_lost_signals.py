"""What changed without a signal of systemd's is seen at the next glance, by one call for all."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from builders import FakeHost, a_spec, running, unit, until

from agent.services import units as units_module


@pytest.fixture
def calls(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what systemd is asked; it is looked at often, and never says by itself what changed."""
    counted = Counter[str]()
    systemd: Any = host.fake.systemd
    monkeypatch.setattr(units_module, "LOOK_S", 0.02)

    def counting(name: str) -> None:
        asked = getattr(systemd, name)

        def ask(argument: str) -> object:
            counted[name] += 1
            return asked(argument)

        monkeypatch.setattr(systemd, name, ask)

    for name in ("find", "glance"):
        counting(name)
    return counted


async def test_a_task_that_ends_unheard_is_seen_and_started_again(
    host: FakeHost, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal of the bus that was lost costs a moment, not the task."""
    async with host.serving() as (_, client):
        for name in ("one", "two", "three"):
            await client.put_task(name, a_spec())
            await running(client, name)
        monkeypatch.setattr(host.fake.systemd, "_tell", lambda _: None)
        host.fake.systemd.exit(unit("two"), 7)
        await until(client, "two", lambda s: s.last_exit is not None and s.last_exit.code == 7)
        assert calls["glance"] > 0


async def test_tasks_that_run_are_looked_at_together_and_not_each(
    host: FakeHost, calls: Counter[str]
) -> None:
    async with host.serving() as (_, client):
        for name in ("one", "two", "three"):
            await client.put_task(name, a_spec())
            await running(client, name)
        seen = calls["glance"]
        while calls["glance"] < seen + 2:  # the looks that the last start caused are over
            await asyncio.sleep(0.01)
        found, seen = calls["find"], calls["glance"]
        while calls["glance"] < seen + 5:
            await asyncio.sleep(0.01)
        assert calls["find"] == found
