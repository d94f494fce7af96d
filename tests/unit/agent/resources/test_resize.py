"""A running task is enlarged and shrunk, on a machine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from builders import FakeHost, a_record, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import COUNT_MAX, IoLimit, ProfileSpec, Resize, Resources, TaskSpec, Volume
from agent.resources.core.limits import kernel_values
from agent.runtime.core.slices import cgroup_of
from agent.runtime.journal import Journal
from wire.errors import Conflict, InvalidInput, NotFound, Unprocessable

MIB = 1 << 20


async def _until(seen: Callable[[], bool]) -> None:
    """Return when a condition holds that no event reports."""
    async with asyncio.timeout(60):
        while not seen():
            await asyncio.sleep(0.01)


async def test_a_resize_reaches_the_running_unit_and_restarts_nothing(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        before = (await running(client, "web")).invocation_id

        status = await client.resize_task(
            "web", Resize(memory_max_bytes=64 * MIB, memory_low_bytes=8 * MIB, io_weight=7)
        )
        assert status.generation == 2
        await _until(lambda: host.fake.systemd.properties(unit("web")).get("MemoryLow") == 8 * MIB)

        properties = host.fake.systemd.properties(unit("web"))
        assert (properties["MemoryMax"], properties["IOWeight"]) == (64 * MIB, 7)
        assert (await client.get_task("web")).invocation_id == before


async def test_a_limit_that_the_kernel_did_not_take_is_tried_again_and_not_believed(
    tmp_path: Path,
) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    spec = a_spec()
    group = cgroup_of("web", spec)
    async with host.serving() as (services, client):
        await client.put_task("web", spec)
        await running(client, "web")
        host.fake.cgroups.files[group] = kernel_values(spec, 4096) | {"memory.max": "4096"}
        await client.resize_task("web", Resize(tasks_max=9))
        await _until(lambda: host.fake.systemd.properties(unit("web"))["TasksMax"] == 9)
        assert services.tasks.running("web").limits != services.tasks.record("web").spec.limits


@pytest.mark.behaviour("BUG-AG55")
async def test_a_limit_is_confirmed_on_a_kernel_with_large_pages(tmp_path: Path) -> None:
    """The kernel rounds down to its own pages, for instance of 64 KiB on Arm."""
    host = FakeHost(tmp_path)
    host.give_image()
    host.fake.hardware = replace(host.fake.hardware, page_bytes=1 << 16)
    spec = a_spec()
    async with host.serving() as (services, client):
        await client.put_task("web", spec)
        await running(client, "web")
        rounded = kernel_values(spec, 4096) | {"memory.max": str(64 * MIB)}
        host.fake.cgroups.files[cgroup_of("web", spec)] = rounded
        await client.resize_task("web", Resize(memory_max_bytes=64 * MIB + 4096))
        wanted = services.tasks.record("web").spec.limits
        await _until(lambda: services.tasks.running("web").limits == wanted)


async def test_a_resize_that_does_not_fit_or_of_a_missing_task_is_refused(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        with pytest.raises(NotFound):
            await client.resize_task("web", Resize(tasks_max=9))
        await client.put_task("web", a_spec(generation=5))
        await running(client, "web")
        with pytest.raises(Unprocessable, match=r"web is not resized: .* does not fit"):
            await client.resize_task("web", Resize(memory_max_bytes=1 << 40))
        with pytest.raises(Conflict, match="generation 3 is older than 5"):
            await client.resize_task("web", Resize(tasks_max=9, generation=3))
        assert (await client.get_task("web")).generation == 5


@pytest.mark.behaviour("AG9")
async def test_a_just_started_agent_resizes_a_task_with_a_limited_volume(
    tmp_path: Path,
) -> None:
    """The agent reads the size of the disk and does not rely on a value from the task's start."""
    host = FakeHost(tmp_path)
    host.give_image()
    spec = a_spec(volumes={"data": Volume(path="/data", max_bytes=MIB)})
    async with host.agent() as client:
        await client.put_task("web", spec)
        await running(client, "web")
    async with host.agent() as client:
        await running(client, "web")
        status = await client.resize_task("web", Resize(memory_max_bytes=64 * MIB))
        assert status.generation == 2


@pytest.mark.behaviour("AG8")
async def test_a_task_on_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The task would run without its limit."""
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        for device, there in (("/dev/nope", False), ("/dev/vda", True)):
            io = [IoLimit(device=device, write_bytes_per_s=1000)]
            spec = a_spec(resources=Resources(io=io))
            if there:
                await client.put_task("web", spec)
                await client.resize_task("web", Resize(io_weight=7))
                continue
            with pytest.raises(Unprocessable, match="there is no block device /dev/nope"):
                await client.put_task("web", spec)


@pytest.mark.behaviour("AG8")
async def test_a_device_is_named_by_a_link_in_the_specification_alone(tmp_path: Path) -> None:
    """The limit holds for the real device under each of its names, also when the name changes."""
    host = FakeHost(tmp_path)
    host.give_image()
    host.fake.cgroups.devices = {"vda": "vda", "disk/by-path/pci-0000:00:02.0": "vda"}
    link = "/dev/disk/by-path/pci-0000:00:02.0"

    def limited(device: str, rate: int, generation: int) -> TaskSpec:
        io = [IoLimit(device=device, write_bytes_per_s=rate)]
        return a_spec(resources=Resources(io=io), generation=generation)

    def has_rate(rate: int) -> bool:
        return host.fake.systemd.properties(unit("web")).get("IOWriteBandwidthMax") == {
            "/dev/vda": rate
        }

    async with host.serving() as (services, client):
        await client.put_task("web", limited(link, 1000, 1))
        before = (await running(client, "web")).invocation_id
        assert has_rate(1000)
        for generation, device in enumerate(("/dev/vda", link), start=2):
            await client.put_task("web", limited(device, generation * 1000, generation))
            await _until(partial(has_rate, generation * 1000))
        assert services.tasks.record("web").spec.resources.io[0].device == link
        again = IoLimit(device=link, write_bytes_per_s=7)
        await client.resize_task("web", Resize(io=[again]))
        await _until(partial(has_rate, 7))
        await client.resize_task("web", Resize(io=[IoLimit(device=link)]))
        await _until(partial(has_rate, 2**64 - 1))
        assert services.tasks.record("web").spec.resources.io == []
        with pytest.raises(Unprocessable, match=r"has /dev/disk/by-path/pci-0000:00:02\.0"):
            await client.put_task("web", limited("/dev/disk/by-path/pci-9", 1, 9))
        assert (await client.get_task("web")).invocation_id == before


@pytest.mark.behaviour("BUG-HT25")
async def test_a_generation_leaves_room_for_those_that_follow(tmp_path: Path) -> None:
    """After 2^53 through the socket and a resize, all answers broke their own schema."""
    host = FakeHost(tmp_path)
    host.give_image()
    most = COUNT_MAX // 2
    async with host.agent() as client:
        for given in (most + 1, COUNT_MAX):
            with pytest.raises(InvalidInput, match=f"at most {most}"):
                await client.put_task("web", a_spec(generation=given))
        await client.put_task("web", a_spec(generation=most))
        with pytest.raises(InvalidInput):
            await client.resize_task("web", Resize(tasks_max=9, generation=COUNT_MAX))
        with pytest.raises(InvalidInput):
            await client.delete_task("web", generation=COUNT_MAX)
        status = await client.resize_task("web", Resize(tasks_max=9))
        assert status.generation == most + 1
        assert [t.task_id for t in (await client.list_tasks()).tasks] == ["web"]


@pytest.mark.behaviour("BUG-HT25")
async def test_a_term_that_no_control_plane_has_spoken_in_cannot_be_given(tmp_path: Path) -> None:
    """With epoch 2^53 through the socket no control plane could command the task again."""
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.serving() as (services, client):
        services.contact.record_contact("", 5)
        await client.put_task("web", a_spec(generation=1, epoch=5))
        for epoch in (6, 1 << 40):
            refusals = (
                client.put_task("web", a_spec(generation=2, epoch=epoch)),
                client.put_task("other", a_spec(generation=2, epoch=epoch)),
                client.resize_task("web", Resize(tasks_max=9, epoch=epoch)),
                client.restart_task("web", epoch=epoch),
                client.delete_task("web", epoch=epoch),
                client.delete_task("absent", generation=1, epoch=epoch),
                client.put_profile(ProfileSpec(name="base", generation=1, epoch=epoch)),
            )
            for refused in refusals:
                with pytest.raises(
                    InvalidInput, match=(f"cannot have epoch {epoch}: the latest control")
                ):
                    await refused
        assert services.contact.term == 5
        assert [(t.task_id, t.epoch) for t in (await client.list_tasks()).tasks] == [("web", 5)]


@pytest.mark.behaviour("BUG-HT25")
async def test_a_task_of_an_unknown_term_is_removed_and_sent_again(
    tmp_path: Path,
) -> None:
    """`twine-agent stop` repairs the task, and the control plane continues."""
    host = FakeHost(tmp_path)
    host.give_image()
    wrong = a_spec(generation=COUNT_MAX // 2, epoch=COUNT_MAX)
    Journal(host.state / "journal").save(a_record(spec=wrong))
    async with host.serving() as (services, client):
        services.contact.record_contact("", 5)
        assert services.contact.term == COUNT_MAX
        with pytest.raises(Conflict, match="is older than"):
            await client.put_task("web", a_spec(generation=7, epoch=5))
        await client.delete_task("web")
        await gone(client, "web")
        assert services.contact.term == services.contact.request_epoch == 0
        services.contact.record_contact("", 5)
        await client.put_task("web", a_spec(generation=7, epoch=5))
        assert (await running(client, "web")).epoch == 5
    async with host.serving() as (services, _):
        assert services.contact.term == 5
