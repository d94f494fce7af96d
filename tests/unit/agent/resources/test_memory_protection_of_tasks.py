"""Slices protect the memory that their tasks were promised, on a machine in memory (ADR 0117)."""

from __future__ import annotations

import asyncio

import pytest
from builders import FakeHost, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import Limits, Resize, Resources, RestartPolicy, RestartWhen, TaskSpec
from wire.errors import Unprocessable

ALL, LOCAL, LATE = "workload.slice", "workload-local.slice", "workload-late.slice"
MIB = 1 << 20


def promised(minimum: int, low: int = 0, entitlement: str = "local") -> TaskSpec:
    resources = Resources(memory_min_bytes=minimum * MIB, memory_low_bytes=low * MIB)
    limits = Limits(memory_max_bytes=64 * MIB)
    return a_spec(resources=resources, entitlement=entitlement, limits=limits)


def kept(host: FakeHost, name: str) -> tuple[object, object]:
    """Return `MemoryMin` and `MemoryLow` of a slice."""
    found = host.fake.systemd.properties(name)
    return found.get("MemoryMin"), found.get("MemoryLow")


@pytest.mark.behaviour("AG8")
async def test_slices_protect_the_sum_of_the_memory_promised_to_their_tasks(host: FakeHost) -> None:
    """It is set before the start of a task until its removal; without promises nothing is set."""
    async with host.agent() as client:
        await client.put_task("plain", a_spec())
        await running(client, "plain")
        assert kept(host, ALL) == kept(host, LOCAL) == (None, None)

        for name, spec in (("a", promised(8)), ("b", promised(16, 32))):
            await client.put_task(name, spec)
            await running(client, name)
        await client.put_task("c", promised(4, entitlement="late"))
        await running(client, "c")
        assert kept(host, LOCAL) == (24 * MIB, 32 * MIB)
        assert kept(host, LATE) == (4 * MIB, 0)
        assert kept(host, ALL) == (28 * MIB, 32 * MIB)

        await client.resize_task("a", Resize(memory_min_bytes=10 * MIB))
        async with asyncio.timeout(60):
            while kept(host, LOCAL) != (26 * MIB, 32 * MIB):
                await asyncio.sleep(0.01)
        for name in ("b", "c"):
            await client.delete_task(name)
            await gone(client, name)
        assert kept(host, LATE) == (0, 0)
        assert kept(host, ALL) == kept(host, LOCAL) == (10 * MIB, 0)


@pytest.mark.behaviour("BUG-AG55")
async def test_memory_is_protected_on_a_kernel_with_large_pages(host: FakeHost) -> None:
    """The kernel rounds down to its own pages, for instance of 64 KiB on Arm."""
    host.fake.hardware = replace(host.fake.hardware, page_bytes=1 << 16)
    odd = replace(promised(8), resources=Resources(memory_min_bytes=8 * MIB + 4096))
    async with host.agent() as client:
        await client.put_task("a", odd)
        await running(client, "a")
    assert kept(host, LOCAL) == (8 * MIB + 4096, 0)


async def test_a_new_agent_releases_memory_protected_by_an_earlier_one(
    host: FakeHost,
) -> None:
    """The agent reads the values that are in force and does not rely on records."""
    async with host.agent() as client:
        for name in ("a", "b"):
            await client.put_task(name, promised(8))
            await running(client, name)
    async with host.agent() as client:
        assert kept(host, LOCAL) == (16 * MIB, 0)
        for name in ("a", "b"):
            await client.delete_task(name)
            await gone(client, name)
        await client.put_task("plain", a_spec())
        await running(client, "plain")
        assert kept(host, ALL) == (0, 0)


async def test_a_task_does_not_start_before_its_slice_protects_its_memory(host: FakeHost) -> None:
    """The agent asks a kernel that does not confirm again, and the task reports why it waits."""
    reported = {"memory.min": "4096", "memory.low": "0"}
    host.fake.cgroups.files["/workload.slice"] = reported
    async with host.agent() as client:
        await client.put_task("a", promised(8))
        async with asyncio.timeout(60):
            while "memory.min is '4096'" not in (await client.get_task("a")).reason:
                await asyncio.sleep(0.01)
        assert "twine-task-a.service" not in host.units()
        del host.fake.cgroups.files["/workload.slice"]
        await running(client, "a")


@pytest.mark.behaviour("AG8")
async def test_memory_protected_for_an_ended_task_is_available_to_others(host: FakeHost) -> None:
    """The task has no process that could use the memory; its restart reserves it again."""
    most = host.fake.hardware.memory_bytes // MIB // 4 * 3
    once = RestartPolicy(when=RestartWhen.NEVER)
    large = replace(promised(most), limits=Limits(memory_max_bytes=most * MIB), restart=once)
    async with host.agent() as client:
        await client.put_task("a", large)
        await running(client, "a")
        host.fake.systemd.exit(unit("a"))
        async with asyncio.timeout(60):
            while kept(host, LOCAL) != (0, 0):
                await asyncio.sleep(0.01)
        await client.put_task("b", large)
        await running(client, "b")
        assert kept(host, LOCAL) == kept(host, ALL) == (most * MIB, 0)
        with pytest.raises(Unprocessable, match=r"a is not restarted: resources\.memory_min_bytes"):
            await client.restart_task("a")
        await client.delete_task("b")
        await gone(client, "b")
        await client.restart_task("a")
        await running(client, "a")
        assert kept(host, LOCAL) == (most * MIB, 0)
