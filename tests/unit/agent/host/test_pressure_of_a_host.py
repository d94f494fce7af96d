"""On a host that is short, starts wait for a slot, and the right task is evicted and reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import FakeHost, a_spec, gone, running, unit, until

from agent import composition
from agent.api import Limits, Resources, RestartPolicy, TaskState
from agent.host import pressure
from agent.host.core import pressure as core_pressure
from agent.machine import Usage
from agent.runtime.core.slices import cgroup_of
from agent.tasks.starts import Starts

MIB = 1 << 20


@pytest.mark.behaviour("F-11")
async def test_starts_get_places_in_the_order_of_their_requests() -> None:
    starts, began = Starts(2), list[int]()
    leave = [asyncio.Event() for _ in range(5)]

    async def start(number: int) -> None:
        async with starts.slot():
            began.append(number)
            await leave[number].wait()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(start(number)) for number in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (began, starts.starting) == ([0, 1], 2)
        tasks[2].cancel()
        starts.allow(1)
        leave[0].set()
        await tasks[0]
        assert (began, starts.starting) == ([0, 1], 1)
        leave[1].set()
        await tasks[1]
        await asyncio.sleep(0)
        assert began == [0, 1, 3]
        starts.allow(9)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert began == [0, 1, 3, 4]
        for event in leave:
            event.set()
    assert starts.starting == 0


async def test_an_unused_place_is_passed_on() -> None:
    starts = Starts(1)

    async def start() -> None:
        async with starts.slot():
            pass

    async with starts.slot():
        second = asyncio.ensure_future(start())
        await asyncio.sleep(0)
        assert starts.starting == 1
    assert starts.starting == 1  # assigned to the second task, which has not run yet
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    async with asyncio.timeout(60), starts.slot():
        assert starts.starting == 1


@pytest.mark.behaviour("F-14")
async def test_the_task_with_most_memory_is_evicted_and_the_event_has_the_reason(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is restarted after a pause; a task within its promise is not evicted."""
    monkeypatch.setattr(pressure, "CHECK_S", 0.01)
    monkeypatch.setattr(pressure, "IDLE_CHECK_S", 0.01)
    slow = RestartPolicy(backoff_s=3600.0, backoff_max_s=3600.0)
    kept = Resources(memory_min_bytes=128 * MIB)
    async with host.agent() as client:
        for name, resources in (("small", Resources()), ("big", Resources()), ("kept", kept)):
            await client.put_task(name, a_spec(restart=slow, resources=resources))
            await running(client, name)
        for name, used in (("small", 10), ("big", 90), ("kept", 120)):
            group = cgroup_of(name, a_spec())
            host.fake.cgroups.usage[group] = Usage(memory_bytes=used * MIB)
        after = (await client.get_events(0)).latest
        host.fake.cgroups.waits["/workload.slice", "memory"] = 0.9
        status = await until(client, "big", lambda s: s.state is TaskState.BACKOFF)

        assert status.last_exit
        assert status.last_exit.result == "evicted"
        assert "it was evicted: for 90% of the last 10 s" in status.reason
        events = (await client.get_events(after)).events
        messages = [e.message for e in events if e.object == "big"]
        assert any("it was evicted" in message for message in messages)
        while "twine-task-big.service" in host.units():
            await asyncio.sleep(0.01)
        for name in ("small", "kept"):
            assert (await client.get_task(name)).state is TaskState.RUNNING


@pytest.mark.behaviour("F-14")
async def test_a_task_that_waits_at_its_own_limit_does_not_have_to_go(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this task runs, so its slice waits whenever it does; the host has free memory."""
    monkeypatch.setattr(pressure, "CHECK_S", 0.01)
    monkeypatch.setattr(pressure, "IDLE_CHECK_S", 0.01)
    spec = a_spec(limits=Limits(memory_max_bytes=100 * MIB))
    usage, waits = host.fake.cgroups.usage, host.fake.cgroups.waits
    checks: list[list[str]] = []

    def counted(*arguments: Any) -> list[str]:
        checks.append(core_pressure.at_own_limits(*arguments))
        return checks[-1]

    monkeypatch.setattr(pressure, "at_own_limits", counted)
    async with host.agent() as client:
        for name in ("web", "idle"):
            await client.put_task(name, spec)
            await running(client, name)
        usage[cgroup_of("web", spec)] = Usage(memory_bytes=99 * MIB, memory_pressure=0.8)
        waits["/workload.slice", "memory"] = 0.8
        while checks.count(["web"]) < 3 * core_pressure.CHECKS_TO_EVICT:
            await asyncio.sleep(0.01)
        assert (await client.get_task("web")).last_exit is None
        usage[cgroup_of("idle", spec)] = Usage(memory_bytes=9 * MIB, memory_pressure=0.5)
        status = await until(client, "web", lambda s: s.last_exit is not None)

    assert status.last_exit is not None
    assert status.last_exit.result == "evicted"


KILLED = "Killed /workload.slice/workload-local.slice/{} due to memory used being more than 90.00%"


@pytest.mark.behaviour("F-14")
async def test_a_task_that_systemd_oomd_killed_reports_it(host: FakeHost) -> None:
    """The reason is not "more than its limit", which systemd's own result means otherwise."""
    reported = KILLED.format(unit("web"))
    host.fake.processes.answers[("journalctl",)] = [reported.encode()]
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        host.fake.systemd.oom(unit("web"))
        status = await until(client, "web", lambda s: s.last_exit is not None)

    assert status.last_exit is not None
    assert (status.last_exit.result, status.last_exit.signal) == ("oomd-kill", "SIGKILL")
    assert "systemd-oomd killed it, since its host was short of memory: memory" in status.reason


@pytest.mark.behaviour("F-14")
async def test_no_task_is_evicted_after_systemd_oomd_has_just_freed_memory(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three tasks were evicted for one shortage; later evictions work as usual."""
    monkeypatch.setattr(pressure, "CHECK_S", 0.01)
    monkeypatch.setattr(pressure, "IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(core_pressure, "PAUSE_S", 0.05)
    answers, calls = host.fake.processes.answers, host.fake.processes.calls
    answers[("journalctl",)] = [KILLED.format(unit("gone")).encode()]
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        host.fake.cgroups.usage[cgroup_of("web", a_spec())] = Usage(memory_bytes=9 * MIB)
        host.fake.cgroups.waits["/workload.slice", "memory"] = 0.9
        while sum("_SYSTEMD_UNIT=systemd-oomd.service" in call for call in calls) < 4:
            await asyncio.sleep(0.01)
        assert (await client.get_task("web")).last_exit is None
        answers[("journalctl",)] = []
        status = await until(client, "web", lambda s: s.last_exit is not None)
        assert status.last_exit is not None
        assert status.last_exit.result == "evicted"


@pytest.mark.behaviour("F-11")
async def test_a_host_under_pressure_starts_one_task_at_a_time(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requested tasks still start, one after the other."""
    monkeypatch.setattr(pressure, "CHECK_S", 0.01)
    monkeypatch.setattr(pressure, "IDLE_CHECK_S", 0.01)
    host.fake.cgroups.waits["/hostcritical.slice", "cpu"] = 0.9
    async with host.serving() as (services, client):
        starts = services.tasks._host.starts
        while starts.allowed != 1:
            await asyncio.sleep(0.01)
        names = [f"web-{number}" for number in range(20)]
        for name in names:
            await client.put_task(name, a_spec(limits=Limits(memory_max_bytes=8 * MIB)))
        for name in names:
            await running(client, name)
        assert starts.starting <= 1


@pytest.mark.behaviour("F-11")
async def test_a_start_keeps_its_place_until_its_unit_is_up(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd has much work before a command runs; a hundred starts at once were observed."""
    made: list[Starts] = []

    class OnePlace(Starts):
        def __init__(self, allowed: int) -> None:
            super().__init__(1)
            made.append(self)

        def allow(self, number: int) -> None:
            super().allow(1)

    monkeypatch.setattr(composition, "Starts", OnePlace)
    systemd = host.fake.systemd
    systemd.slow = {unit("a"), unit("b")}
    async with host.agent() as client:
        await client.put_task("a", a_spec())
        await until(client, "a", lambda _: unit("a") in systemd.started)
        await client.put_task("b", a_spec())
        [starts] = made
        await until(client, "b", lambda _: len(starts._waiting) == 1)
        # an event that wakes the loop of the first task does not release its slot
        for _ in range(20):
            host.fake.systemd.lose_bus()
            await client.get_task("a")
        assert unit("b") not in systemd.started
        systemd.become_active(unit("a"))
        await running(client, "a")
        await until(client, "b", lambda _: unit("b") in systemd.started)
        await client.delete_task("b")  # a deletion does not wait for the start of the task
        await gone(client, "b")
