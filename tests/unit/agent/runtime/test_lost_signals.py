"""The next periodic check, one call for all units, finds changes without a systemd signal."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from builders import FakeHost, a_spec, running, unit, until
from msgspec.structs import replace

from agent.api import TaskState
from agent.runtime import units as units_module
from agent.runtime.core.records import TaskRecord, is_first_start
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes


@pytest.fixture
def calls(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls to systemd; checks are frequent, and no signal reports a change."""
    counted = Counter[str]()
    systemd: Any = host.fake.systemd
    monkeypatch.setattr(units_module, "READ_S", 0.02)

    def counting(name: str) -> None:
        original = getattr(systemd, name)

        def ask(argument: str) -> object:
            counted[name] += 1
            return original(argument)

        monkeypatch.setattr(systemd, name, ask)

    for name in ("find", "unit_states"):
        counting(name)
    return counted


async def test_a_task_that_ends_without_a_signal_is_seen_and_started_again(
    host: FakeHost, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost bus signal delays the detection, but does not lose the task."""
    async with host.serving() as (_, client):
        for name in ("one", "two", "three"):
            await client.put_task(name, a_spec())
            await running(client, name)
        monkeypatch.setattr(host.fake.systemd, "_notify", lambda _: None)
        host.fake.systemd.exit(unit("two"), 7)
        await until(client, "two", lambda s: s.last_exit is not None and s.last_exit.code == 7)
        assert calls["unit_states"] > 0


async def test_units_without_followers_do_not_wake_the_event_loop(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, lanes, woken = asyncio.get_running_loop(), Lanes(), list[object]()
    units = units_module.Units(host.fake.systemd, lanes)
    ends = units.listen()
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda _, *args: woken.append(args))
    notify = host.fake.systemd._notify
    with units.changes("a.service", asyncio.Event()):
        for name in ("sshd.service", "a.service", "b.service", ""):
            notify(name)
    notify("a.service")
    monkeypatch.undo()
    ends()
    lanes.close()

    assert woken == [("a.service",), ("",)]


async def test_running_tasks_are_read_together(host: FakeHost, calls: Counter[str]) -> None:
    async with host.serving() as (_, client):
        for name in ("one", "two", "three"):
            await client.put_task(name, a_spec())
            await running(client, name)
        seen = calls["unit_states"]
        while calls["unit_states"] < seen + 2:  # the checks that the last start caused have ended
            await asyncio.sleep(0.01)
        found, seen = calls["find"], calls["unit_states"]
        while calls["unit_states"] < seen + 5:
            await asyncio.sleep(0.01)
        assert calls["find"] == found


async def test_a_start_asks_once_how_its_unit_is(
    host: FakeHost, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's loop reuses the state that the start read: a read is five calls on the bus."""
    monkeypatch.setattr(units_module, "READ_S", 1000.0)
    async with host.serving() as (_, client):
        while not calls["find"]:  # an agent that begins checks whether a profile is being applied
            await asyncio.sleep(0.01)
        before = calls["find"]
        for name in ("one", "two", "three"):
            await client.put_task(name, a_spec())
            await running(client, name)
        assert calls["find"] == before + 3


async def test_an_end_right_after_the_check_of_a_start_is_seen(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    systemd, name = host.fake.systemd, unit("one")
    find_unit, ended = systemd.find, list[str]()

    def find(original: str) -> object:
        state = find_unit(original)
        if original == name and state is not None and state.active == "active" and not ended:
            ended.append(original)
            systemd.exit(name, 7)  # after the result was read, before the agent acts on it
        return state

    monkeypatch.setattr(systemd, "find", find)
    async with host.serving() as (_, client):
        await client.put_task("one", a_spec())
        await until(client, "one", lambda s: s.last_exit is not None and s.last_exit.code == 7)


@pytest.mark.parametrize(
    ("before", "after", "only"),
    [
        ({}, {}, True),
        ({"state": TaskState.ACCEPTED}, {}, True),
        ({}, {"state": TaskState.FAILED}, False),
        ({"restarts": 1}, {"restarts": 1}, False),
        ({"invocation_id": "a"}, {}, False),
        ({}, {"spec": a_spec(generation=2)}, False),
        ({"previous": a_spec()}, {}, False),
        ({"state": TaskState.BACKOFF}, {}, False),
        ({"state": TaskState.RUNNING}, {}, False),
    ],
)
def test_only_a_first_start_is_not_waited_for_until_it_is_on_disk(
    before: dict[str, Any], after: dict[str, Any], only: bool
) -> None:
    task = TaskRecord(task_id="one", spec=a_spec(), state=TaskState.STARTING)
    was = replace(task, **before)
    came_up = {"state": TaskState.RUNNING, "invocation_id": "b", "previous": None, **after}

    assert is_first_start(was, replace(was, **came_up)) is only


async def test_a_record_of_a_started_task_survives_a_killed_agent(
    host: FakeHost,
) -> None:
    async with host.serving() as (_, client):
        await client.put_task("one", a_spec())
        status = await running(client, "one")
        async with asyncio.timeout(60):
            while status.invocation_id not in (host.state / "journal" / "one.json").read_text():
                await asyncio.sleep(0.01)
    kept = Journal(host.state / "journal").replay().tasks["one"]
    assert (kept.state, kept.invocation_id) == (TaskState.RUNNING, status.invocation_id)
