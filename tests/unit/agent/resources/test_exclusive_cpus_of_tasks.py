"""Tasks with exclusive CPUs, on a machine in memory (docs/resources.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import Resize, Resources, RestartPolicy, RestartWhen, TaskSpec, TaskState
from agent.client import AgentClient
from agent.machine.fake import HARDWARE
from agent.runtime.journal import Journal
from wire.cpus import Core
from wire.errors import HostError, Unprocessable

SHARED, EFFECTIVE = "workload-local.slice", "cpuset.cpus.effective"


@pytest.fixture(autouse=True)
def four_cpus(host: FakeHost) -> None:
    """Give the machine four cores of one CPU each."""
    host.fake.hardware = replace(HARDWARE, cpu=replace(HARDWARE.cpu, online=4))


def own(count: int, **fields: object) -> TaskSpec:
    return a_spec(resources=Resources(exclusive_cpus=count), **fields)


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not seen():
            await asyncio.sleep(0.01)


async def cpus_of(client: AgentClient, task_id: str, count: int) -> list[int]:
    """Return the exclusive CPUs that a task reports, when their number is `count`."""
    async with asyncio.timeout(60):
        while len(found := (await client.get_task(task_id)).cpus) != count:
            await asyncio.sleep(0.01)
    return found


async def removed(client: AgentClient, task_id: str) -> None:
    await client.delete_task(task_id)
    await gone(client, task_id)


def allowed(host: FakeHost, name: str) -> object:
    return host.fake.systemd.properties(name).get("AllowedCPUs")


async def test_other_tasks_use_exclusive_cpus_only_after_their_task_ended(host: FakeHost) -> None:
    async with host.agent() as client:
        latest = (await client.get_events(after=0)).latest
        await client.put_task("web", a_spec())
        await running(client, "web")
        assert allowed(host, SHARED) is None  # nothing is bound while no task requests CPUs

        await client.put_task("db", own(2))
        assert await cpus_of(client, "db", 2) == [2, 3]
        assert allowed(host, SHARED) == (0, 1)
        assert allowed(host, unit("db")) == (2, 3)
        (state,) = host.fake.systemd.units(unit("db"))
        assert "workload-local_own.slice" in state.control_group
        events = (await client.get_events(after=latest)).events
        assert "CPUs 2-3 are its own" in str([event.message for event in events])

        await client.put_task("other", a_spec(entitlement="late"))
        await running(client, "other")
        assert allowed(host, "workload-late.slice") == (0, 1)

        await removed(client, "db")
        assert allowed(host, SHARED) == allowed(host, "workload-late.slice") == (0, 1, 2, 3)


async def test_a_request_that_does_not_fit_is_refused_with_the_numbers(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        with pytest.raises(Unprocessable, match="would leave no CPU of 4 for another task"):
            await client.put_task("db", own(4))
        await client.put_task("db", own(2))
        with pytest.raises(Unprocessable, match=r"tasks may use 4 CPUs \(0-3\), 2 CPUs \(2-3\)"):
            await client.put_task("db2", own(3))
        with pytest.raises(
            Unprocessable, match=r"resources.cpus: CPU 2 is exclusive to another task"
        ):
            await client.put_task("pin", a_spec(resources=Resources(cpus=[2])))
        with pytest.raises(Unprocessable, match="cannot be combined with exclusive_cpus"):
            await client.put_task("odd", a_spec(resources=Resources(cpus=[1], exclusive_cpus=1)))
        with pytest.raises(Unprocessable, match="requires a restart"):
            await client.resize_task("web", Resize(exclusive_cpus=1))
        await running(client, "db")


async def test_a_task_gets_all_cpus_only_if_no_task_shares(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("db", own(4))
        assert await cpus_of(client, "db", 4) == [0, 1, 2, 3]
        with pytest.raises(
            Unprocessable, match=r"all 4 CPUs for tasks \(0-3\) are exclusive to other tasks"
        ):
            await client.put_task("web", a_spec())


async def test_a_resize_moves_others_first_and_restarts_nothing(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await client.put_task("db", own(1))
        assert await cpus_of(client, "db", 1) == [3]
        before = (await client.get_task("db")).invocation_id
        await client.resize_task("db", Resize(exclusive_cpus=3))
        assert await cpus_of(client, "db", 3) == [1, 2, 3]
        assert allowed(host, SHARED) == (0,)
        await client.resize_task("db", Resize(exclusive_cpus=1))
        assert await cpus_of(client, "db", 1) == [3]
        await until(lambda: allowed(host, SHARED) == (0, 1, 2))
        assert (await client.get_task("db")).invocation_id == before


async def test_the_next_agent_continues_with_the_given_cpus(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("db", own(1))
        await client.put_task("cache", own(1))
        before = [await cpus_of(client, name, 1) for name in ("db", "cache")]
        assert before == [[3], [2]]
    async with host.agent() as client:
        assert [await cpus_of(client, name, 1) for name in ("db", "cache")] == before
        await client.put_task("web", a_spec(entitlement="late"))
        await running(client, "web")
        assert allowed(host, "workload-late.slice") == (0, 1)
        await removed(client, "db")
        await client.put_task("db", own(1, generation=2))
        assert await cpus_of(client, "db", 1) == [3]


async def test_a_bound_that_an_agent_left_behind_is_lifted_by_the_next(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        await client.put_task("db", own(2))
        await cpus_of(client, "db", 2)
    host.fake.systemd.stop(unit("db"))  # and the agent dies before it returns them
    journal = Path(host.config.state_dir) / "journal"
    for record in journal.glob("db*"):
        record.unlink()
    async with host.agent() as client:
        await client.put_task("next", a_spec())
        await running(client, "next")
        assert allowed(host, SHARED) == (0, 1, 2, 3)


async def test_it_does_not_start_before_the_kernel_has_others_off_its_cpus(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        group = f"/workload.slice/{SHARED}"
        host.fake.cgroups.files[group] = {EFFECTIVE: "0-3", "cgroup.events": "populated 1"}
        await client.put_task("db", own(1))
        async with asyncio.timeout(60):
            while "may still use CPUs 3" not in (await client.get_task("db")).reason:
                await asyncio.sleep(0.01)
        assert unit("db") not in host.fake.systemd.started
        host.fake.cgroups.files[group] = {EFFECTIVE: "0-2", "cgroup.events": "populated 1"}
        assert await cpus_of(client, "db", 1) == [3]


async def test_exclusive_cpus_count_once_the_cgroup_of_the_task_has_them(host: FakeHost) -> None:
    group = f"/workload.slice/workload-local_own.slice/{unit('db')}"
    host.fake.cgroups.files[group] = {EFFECTIVE: "0-3"}
    async with host.agent() as client:
        await client.put_task("db", own(1))
        await running(client, "db")
        assert (await client.get_task("db")).cpus == []
        host.fake.cgroups.files[group] = {EFFECTIVE: "3"}
        assert await cpus_of(client, "db", 1) == [3]


async def test_others_run_on_the_cpus_of_a_task_that_ended(host: FakeHost) -> None:
    once = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await client.put_task("db", own(2, restart=once))
        await cpus_of(client, "db", 2)
        host.fake.systemd.exit(unit("db"))
        await until(lambda: allowed(host, SHARED) == (0, 1, 2, 3))
        assert (await client.get_task("db")).state is TaskState.STOPPED
        with pytest.raises(Unprocessable, match="does not fit"):
            await client.put_task("db2", own(3))  # they stay claimed, as its memory does
        await client.restart_task("db")
        assert await cpus_of(client, "db", 2) == [2, 3]
        assert allowed(host, SHARED) == (0, 1)


async def test_a_task_that_shares_again_gives_its_cpus_back(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await client.put_task("db", own(2))
        await cpus_of(client, "db", 2)
        await client.put_task("db", a_spec(generation=2))
        await until(lambda: allowed(host, SHARED) == (0, 1, 2, 3))
        await running(client, "db")
        (state,) = host.fake.systemd.units(unit("db"))
        assert SHARED in state.control_group
        assert allowed(host, unit("db")) is None


async def test_cpus_that_the_host_took_away_are_replaced_at_the_next_start(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("db", own(1))
        assert await cpus_of(client, "db", 1) == [3]
        host.fake.cores = (*(Core((n,)) for n in range(3)), Core((), others=(3,)))
        await client.restart_task("db")
        async with asyncio.timeout(60):
            while (await client.get_task("db")).cpus != [2]:
                await asyncio.sleep(0.01)


async def test_a_choice_that_could_not_be_saved_is_taken_back(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.serving() as (services, client):
        await client.put_task("db", own(1))
        await cpus_of(client, "db", 1)
        save = Journal.save

        def full(*_: object, **__: object) -> None:
            raise HostError("no room")

        monkeypatch.setattr(Journal, "save", full)
        for name, count in (("new", 2), ("db", 2)):
            with pytest.raises(Exception, match="no room"):
                await client.put_task(name, own(count, generation=2))
        monkeypatch.setattr(Journal, "save", save)
        await client.put_task("new", own(3))
        assert await cpus_of(client, "new", 3) == [0, 1, 2]
        assert services.tasks.record("db").own_cpus == [3]
