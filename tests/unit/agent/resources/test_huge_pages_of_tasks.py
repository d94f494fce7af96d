"""Tasks with huge pages, on a machine in memory (docs/resources.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from builders import FakeHost, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import Resize, Resources, RestartPolicy, RestartWhen, TaskSpec
from agent.client import AgentClient
from agent.machine.fake import HARDWARE
from wire.errors import Unprocessable

PAGE = 2 << 20
FILE = "hugetlb.2MB.max"
PLAIN = "/workload.slice/workload-local.slice"
OWN = f"/workload.slice/workload-local_huge.slice/{unit('db')}"


@pytest.fixture(autouse=True)
def eight_pages(host: FakeHost) -> None:
    """Give the machine eight huge pages of 2 MiB."""
    host.fake.hardware = replace(HARDWARE, hugepages_bytes=8 * PAGE)


def pages(count: int, **fields: object) -> TaskSpec:
    return a_spec(resources=Resources(hugepages_2mib=count), **fields)


def limit(host: FakeHost, group: str) -> str:
    return host.fake.cgroups.files.get(group, {}).get(FILE, "")


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not seen():
            await asyncio.sleep(0.01)


async def reason(client: AgentClient, task_id: str, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in (await client.get_task(task_id)).reason:
            await asyncio.sleep(0.01)


async def test_a_task_is_limited_before_it_starts_and_others_have_none(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        assert limit(host, PLAIN) == ""  # nothing is bound while no task requests huge pages
        assert "ExecStartPre" not in host.fake.systemd.properties(unit("web"))

        await client.put_task("db", pages(3))
        await running(client, "db")
        assert (limit(host, OWN), limit(host, PLAIN)) == (str(3 * PAGE), "0")
        await client.put_task("late", a_spec(entitlement="late"))
        await running(client, "late")
        assert limit(host, "/workload.slice/workload-late.slice") == "0"

        await client.delete_task("db")
        await gone(client, "db")
        assert limit(host, PLAIN) == limit(host, "/workload.slice/workload-late.slice") == "max"


async def test_pages_are_counted_and_refused_with_the_numbers(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("db", pages(5))
        with pytest.raises(
            Unprocessable,
            match=(
                r"the machine has 8 pages of 2MiB, and other "
                r"tasks hold 5"
            ),
        ):
            await client.put_task("db2", pages(4))
        await client.put_task("db2", pages(3))
        with pytest.raises(Unprocessable, match="has 0 pages of 1GiB"):
            await client.put_task("db3", a_spec(resources=Resources(hugepages_1gib=1)))
        await running(client, "db")
        with pytest.raises(Unprocessable, match="6 does not fit"):
            await client.resize_task("db", Resize(hugepages_2mib=6))
        with pytest.raises(Unprocessable, match="requires a restart"):
            await client.resize_task("db", Resize(hugepages_2mib=0))


@pytest.mark.behaviour("AG8")
async def test_pages_of_a_task_that_is_over_are_there_for_others(host: FakeHost) -> None:
    """The processes are gone; the pages were kept for the task until its removal."""
    once = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        await client.put_task("db", pages(5, restart=once))
        await running(client, "db")
        assert limit(host, PLAIN) == "0"
        host.fake.systemd.exit(unit("db"))
        await until(lambda: limit(host, PLAIN) == "max")  # no task has its own pages

        await client.put_task("db2", pages(8))
        await running(client, "db2")
        assert limit(host, PLAIN) == "0"
        with pytest.raises(
            Unprocessable, match=r"db is not restarted: .* 5 does not fit: .* other tasks hold 8"
        ):
            await client.restart_task("db")
        await client.delete_task("db2")
        await gone(client, "db2")
        await client.restart_task("db")
        await running(client, "db")
        assert (limit(host, OWN), limit(host, PLAIN)) == (str(5 * PAGE), "0")


async def test_pages_of_a_requested_restart_are_taken_at_once(host: FakeHost) -> None:
    once = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("db", pages(5, restart=once))
        await running(client, "db")
        host.fake.systemd.exit(unit("db"))
        await until(lambda: host.fake.systemd.find(unit("db")) is None)
        host.fake.cgroups.pages_used[PLAIN] = PAGE
        await client.put_task("web", a_spec())
        await running(client, "web")
        await client.restart_task("db")
        await reason(client, "db", "more are in use there")
        with pytest.raises(Unprocessable, match=r"4 does not fit: .* other tasks hold 5"):
            await client.put_task("db2", pages(4))


async def test_a_resize_changes_the_limit_and_restarts_nothing(host: FakeHost) -> None:
    async with host.serving() as (services, client):
        await client.put_task("db", pages(3))
        before = (await running(client, "db")).invocation_id
        await client.resize_task("db", Resize(hugepages_2mib=7))
        await until(lambda: limit(host, OWN) == str(7 * PAGE))
        host.fake.cgroups.pages_used[OWN] = 6 * PAGE
        await client.resize_task("db", Resize(hugepages_2mib=2))
        await until(lambda: host.fake.systemd.started.count("twine-pages.service") > 3)
        assert limit(host, OWN) == str(7 * PAGE)  # the task uses more, and the report shows it
        assert services.tasks.record("db").resources != services.tasks.record("db").spec.resources
        host.fake.cgroups.pages_used.clear()
        await until(lambda: limit(host, OWN) == str(2 * PAGE))
        assert (await client.get_task("db")).invocation_id == before


async def test_it_does_not_start_while_others_use_pages_that_they_did_not_ask_for(
    host: FakeHost,
) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        host.fake.cgroups.pages_used[PLAIN] = PAGE
        await client.put_task("db", pages(8))
        await reason(client, "db", "more are in use there")
        assert unit("db") not in host.fake.systemd.started
        host.fake.cgroups.pages_used.clear()
        await running(client, "db")


async def test_a_slice_that_is_about_to_run_is_bounded_like_those_that_do(host: FakeHost) -> None:
    once = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("over", a_spec(entitlement="late", restart=once))
        await running(client, "over")
        host.fake.systemd.exit(unit("over"))
        await until(lambda: host.fake.systemd.find(unit("over")) is None)
        host.fake.systemd.stop("workload-late.slice")
        await client.put_task("db", pages(3))
        await running(client, "db")
        assert limit(host, "/workload.slice/workload-late.slice") == "0"


async def test_it_waits_where_the_pages_are_gone_after_a_boot(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("db", pages(3, offline_restart=True))
        await running(client, "db")
    host.fake.reboot()
    host.fake.hardware = replace(host.fake.hardware, hugepages_bytes=2 * PAGE)
    async with host.agent() as client:
        await reason(
            client,
            "db",
            ("3 does not fit: the machine has 2 pages of 2MiB, and other tasks hold 0"),
        )
        host.fake.hardware = replace(host.fake.hardware, hugepages_bytes=3 * PAGE)
        await running(client, "db")


async def test_another_agent_finds_the_limits_and_lifts_them_at_the_end(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await client.put_task("db", pages(3))
        await running(client, "db")
        await running(client, "web")
    async with host.agent() as client:
        await running(client, "db")
        assert (limit(host, OWN), limit(host, PLAIN)) == (str(3 * PAGE), "0")
        await client.delete_task("db")
        await gone(client, "db")
        assert limit(host, PLAIN) == "max"


async def test_a_kernel_without_the_controller_runs_tasks_without_pages(host: FakeHost) -> None:
    host.fake.hardware = replace(host.fake.hardware, cgroup_controllers=("cpu", "memory", "pids"))
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="no hugetlb controller"):
            await client.put_task("db", pages(1))
        await client.put_task("web", a_spec())
        await running(client, "web")
        assert "twine-pages.service" not in host.fake.systemd.started
