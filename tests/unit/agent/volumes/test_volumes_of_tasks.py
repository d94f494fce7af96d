"""Volumes through the agent's API and command line, on a machine in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import FakeHost, a_spec, gone, running, unit, until

from agent.api import RestartPolicy, RestartWhen, TaskState, Volume, VolumeKind
from agent.api.accounts import Account
from agent.client import AgentClient
from agent.machine import QuotaMode
from wire.errors import Conflict, InvalidInput, NotFound, Unprocessable

MIB = 1 << 20
DATA = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=64 * MIB)
TMP = Volume(path="/work")


def tasks_by_volume(generation: int = 1, **fields: Any) -> Any:
    return a_spec(generation=generation, volumes={"data": DATA, "tmp": TMP}, **fields)


@pytest.mark.behaviour("AG9")
async def test_a_persistent_volume_outlives_its_task_and_is_used_again(
    host: FakeHost,
) -> None:
    """A scratch volume is removed together with the task."""
    async with host.agent() as client:
        await client.put_task("web", tasks_by_volume())
        await running(client, "web")
        kept, scratch = host.state / "volumes/local/web.data", host.state / "scratch/web.tmp"
        (kept / "file").write_text("worth it")
        (scratch / "file").write_text("not")
        await client.delete_task("web")
        await gone(client, "web")
        assert (kept / "file").read_text() == "worth it"
        assert not scratch.exists()

        await client.put_task("web", tasks_by_volume(2))
        await running(client, "web")
        assert (kept / "file").read_text() == "worth it"
        assert list(scratch.iterdir()) == []


@pytest.mark.behaviour("AG9")
async def test_a_limit_changes_while_the_task_runs(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", tasks_by_volume())
        before = (await running(client, "web")).invocation_id
        larger = {"data": Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=99 * MIB)}
        await client.put_task("web", a_spec(generation=2, volumes=larger | {"tmp": TMP}))
        while not any(v.max_bytes == 99 * MIB for v in (await client.list_volumes()).volumes):
            pass
        assert (await client.get_task("web")).invocation_id == before


async def test_a_scratch_volume_that_is_no_longer_requested_is_removed(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", tasks_by_volume())
        await running(client, "web")
        await client.put_task("web", a_spec(generation=2, volumes={"data": DATA}))
        await until(client, "web", lambda s: s.generation == 2 and s.state is TaskState.RUNNING)
        while (host.state / "scratch/web.tmp").exists():
            await client.get_task("web")
        assert (host.state / "volumes/local/web.data").exists()


@pytest.mark.behaviour("AG9")
async def test_snapshots_are_read_only_and_used_ones_are_not_removed(host: FakeHost) -> None:
    """Snapshots are made on demand; the list names the tasks of each volume."""
    async with host.agent() as client:
        await client.put_task("web", tasks_by_volume())
        await running(client, "web")
        made = await client.snapshot_volume("local", "web.data", "before")
        listed = {v.name: v for v in (await client.list_volumes()).volumes}

        assert made == listed["web.data@before"]
        assert (made.kind, made.tasks) == ("snapshot", [])
        assert (listed["web.data"].kind, listed["web.data"].tasks) == ("persistent", ["web"])
        assert (listed["web.tmp"].kind, listed["web.tmp"].tasks) == ("scratch", ["web"])
        found = host.fake.btrfs.find(host.state / "volumes/local/web.data@before")
        assert found
        assert found.read_only
        with pytest.raises(Conflict, match="task web uses it"):
            await client.remove_volume("local", "web.data")
        with pytest.raises(Conflict):
            await client.snapshot_volume("local", "web.data", "before")
        with pytest.raises(NotFound, match=r"has no volume web\.other"):
            await client.snapshot_volume("local", "web.other", "x")
        with pytest.raises(InvalidInput, match="is not the name of a volume"):
            await client.remove_volume("local", "web")
        await client.remove_volume("local", "web.data@before")
        await client.delete_task("web")
        await gone(client, "web")
        await client.remove_volume("local", "web.data")
        assert (await client.list_volumes()).volumes == []


@pytest.mark.behaviour("AG9")
async def test_a_shared_volume_waits_for_its_owner_and_is_read_only(host: FakeHost) -> None:
    """The reason names the missing volume."""
    shared = Volume(kind=VolumeKind.SHARED, path="/theirs", source="db.data")
    async with host.agent() as client:
        await client.put_task("web", a_spec(volumes={"theirs": shared}))
        waiting = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)
        assert "there is no volume local/db.data on this machine" in waiting.reason
        await client.put_task("db", a_spec(volumes={"data": DATA}))
        await running(client, "web")
        properties = host.fake.systemd.properties(unit("web"))
        assert "ReadWritePaths" not in properties
        (mounting,) = properties["ExecStartPre"]  # type: ignore[misc]
        assert f"{host.state}/volumes/local/db.data" in mounting
        await client.delete_task("db")
        await gone(client, "db")
        with pytest.raises(Conflict, match="task web uses it"):
            await client.remove_volume("local", "db.data")


@pytest.mark.behaviour("AG9")
async def test_an_unknown_limit_is_refused_by_name(host: FakeHost) -> None:
    """The whole task is refused; without the limit it runs."""
    host.fake.btrfs.can_count = QuotaMode.OFF
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=r"volumes\.data\.max_bytes needs quotas"):
            await client.put_task("web", tasks_by_volume())
        assert (await client.list_tasks()).tasks == []
        free = Volume(kind=VolumeKind.PERSISTENT, path="/data")
        await client.put_task("web", a_spec(volumes={"data": free}))
        await running(client, "web")
        assert (await client.list_volumes()).quota == "off"


async def test_a_request_that_does_not_fit_is_refused_with_the_numbers(host: FakeHost) -> None:
    huge = {"data": Volume(path="/data", max_bytes=9 << 30)}
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="9GiB do not fit: the disk has"):
            await client.put_task("web", a_spec(volumes=huge))
        both = {"a": Volume(path="/a"), "b": Volume(path="/a/b")}
        with pytest.raises(Unprocessable, match=r"volumes\.b\.path: /a/b overlaps /a"):
            await client.put_task("web", a_spec(volumes=both))


@pytest.mark.behaviour("AG9")
async def test_a_volume_counts_until_its_task_is_removed_also_once_that_has_ended(
    host: FakeHost,
) -> None:
    """The data are on the disk, and the task finds them when it is started again."""
    disk_bytes, _ = host.fake.btrfs.free_bytes(host.state)
    most = {"tmp": Volume(path="/work", max_bytes=disk_bytes * 3 // 4)}
    once = RestartPolicy(when=RestartWhen.NEVER)
    async with host.agent() as client:
        await client.put_task("web", a_spec(volumes=most, restart=once))
        await running(client, "web")
        (host.state / "scratch/web.tmp/file").write_text("worth it")
        host.fake.systemd.exit(unit("web"))
        await until(client, "web", lambda s: s.state is TaskState.STOPPED)
        with pytest.raises(Unprocessable, match="do not fit: the disk has"):
            await client.put_task("db", a_spec(volumes=most))
        await client.restart_task("web")
        await running(client, "web")
        assert (host.state / "scratch/web.tmp/file").read_text() == "worth it"
        await client.delete_task("web")
        await gone(client, "web")
        await client.put_task("db", a_spec(volumes=most))
        await running(client, "db")


async def _accounts(client: AgentClient) -> dict[tuple[str, str], Account]:
    return {(a.kind, a.name): a for a in (await client.get_accounts()).accounts}


@pytest.mark.behaviour("F-42")
async def test_every_volume_is_accounted_for(host: FakeHost) -> None:
    """Volumes name their task; those without an owner and missing ones are reported (P9)."""
    async with host.serving() as (services, client):
        services.accounts.recheck_s = 0.0
        await client.put_task("web", tasks_by_volume())
        await running(client, "web")
        await client.snapshot_volume("local", "web.data", "s")
        btrfs, volumes = host.fake.btrfs, host.state / "volumes"
        btrfs.create(host.state / "scratch" / "lost.tmp")
        btrfs.create(volumes / "local" / "odd")
        btrfs.create(volumes / "local" / "old.data")
        (volumes / "local" / "file").write_text("x")
        odd = {
            ("scratch", "lost.tmp"),
            ("volume", "local/odd"),
            ("file", "volumes/local/file"),
        }
        found = await _accounts(client)
        async with asyncio.timeout(60):  # the agent may still be writing its record
            while {name for name, a in found.items() if a.wrong} != odd:
                found = await _accounts(client)

        assert found["volume", "local/web.data"].why == "the task is here"
        assert "it is kept for a return of the task" in found["volume", "local/old.data"].why
        assert "a snapshot of web.data" in found["volume", "local/web.data@s"].why
        assert found["scratch", "web.tmp"].owner == "task web"
        left = await client.repair_accounts()
        assert not (host.state / "scratch" / "lost.tmp").exists()
        assert {a.name for a in left.accounts} == {"local/odd", "volumes/local/file"}
        btrfs.delete(volumes / "local" / "web.data")
        wrong = [a.name for a in (await client.get_accounts()).accounts if a.wrong]
        assert "web: its volume volumes/local/web.data" in wrong
