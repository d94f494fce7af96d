"""gc and fsck through the agent's own API, on a machine in memory."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from builders import (
    IMAGE,
    OTHER_IMAGE,
    FakeHost,
    a_spec,
    a_tar,
    chunks_of,
    digest_of,
    gone,
    running,
)
from msgspec.structs import replace
from oci import Layout, Registry, files

from agent.api import ImageFormat, ImagePull
from agent.api.accounts import Account
from agent.client import AgentClient
from agent.images.core.retention import DAY_S
from wire.errors import HostError

PLACE = "registry.example/web:"


@asynccontextmanager
async def serving(host: FakeHost) -> AsyncIterator[AgentClient]:
    """Run an agent that makes its second check at once."""
    async with host.serving() as (services, client):
        services.accounts.recheck_s = 0.0
        yield client


async def wrong(client: AgentClient) -> list[tuple[str, str]]:
    return [(a.kind, a.name) for a in (await client.get_accounts()).accounts if a.wrong]


async def at_rest(client: AgentClient) -> dict[tuple[str, str], Account]:
    """Return all accounts when nothing is wrong: a record may still be in the middle of a write."""
    async with asyncio.timeout(60):
        while True:
            found = {(a.kind, a.name): a for a in (await client.get_accounts()).accounts}
            if not any(a.wrong for a in found.values()):
                return found


async def test_a_removed_task_leaves_no_unknown_object(host: FakeHost) -> None:  # P9
    async with serving(host) as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        accounts = await at_rest(client)
        assert accounts["unit", "twine-task-web.service"].owner == "task web"
        assert accounts["root", "web"].owner == "task web"
        assert accounts["image", IMAGE[7:]].why == "task web runs from it"
        await client.delete_task("web")
        await gone(client, "web")
        assert ("root", "web") not in await at_rest(client)


@pytest.mark.behaviour("F-42")
async def test_objects_without_an_owner_are_found_and_removed(host: FakeHost) -> None:
    """Covers unknown objects of every kind, and what a repair leaves for an operator (P9)."""
    host.fake.network.unowned = ["lost", "tw0123456789a"]
    async with serving(host) as client:
        systemd, btrfs, state = host.fake.systemd, host.fake.btrfs, host.state
        systemd.start_transient("twine-task-lost.service", {"ExecStart": [["/bin/x"]]})
        btrfs.create(state / "tasks" / "lost")
        btrfs.create(state / "images" / ("5" * 64))
        btrfs.create(state / "layers" / ("6" * 64))
        (state / "layers" / f"{'7' * 64}.json").write_text("{}")
        (state / "staging" / "x.stream").write_bytes(b"x")
        (state / "journal" / ".lost.new").write_bytes(b"x")
        (state / "core").write_bytes(b"x")
        before = await wrong(client)
        left = await client.repair_accounts()

        assert sorted({kind for kind, _ in before}) == [
            *("file", "image", "layer", "namespace", "record", "root", "staging", "unit", "veth")
        ]
        assert [(a.kind, a.name) for a in left.accounts] == [
            ("file", "core"),
        ]
        assert host.fake.network.unowned == []
        assert len(left.done) >= 8
        assert [os.listdir(state / f) for f in ("tasks", "staging", "layers")] == [[], [], []]
        assert (await client.get_image(IMAGE)).digest == IMAGE


async def test_a_running_task_whose_root_is_missing_is_reported(host: FakeHost) -> None:
    async with serving(host) as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        await at_rest(client)
        host.fake.btrfs.delete(host.state / "tasks" / "web")
        async with asyncio.timeout(60):  # the agent may still be writing its record
            while await wrong(client) != [("record", "web: its root")]:
                pass


@pytest.mark.behaviour("F-40", "F-42")
async def test_images_go_by_age_and_their_layers_with_the_last_of_them(host: FakeHost) -> None:
    """Images in use stay, under any name."""
    registry = Registry()
    host.fake.systemd.programs["skopeo"] = registry.skopeo
    base = files(base="b")
    for tag in ("1", "2"):
        layout = Layout(host.folder / tag)
        registry.push(PLACE + tag, layout, layout.image(base, files(app=tag)))
    host.give_image(OTHER_IMAGE)
    async with serving(host) as client:
        first, second = [(await client.fetch_oci_image(PLACE + tag)).digest for tag in "12"]
        await client.put_task("web", a_spec(image=second, command=["/bin/x"]))
        await running(client, "web")
        assert (await client.collect_garbage()).done == []
        for digest in (first, second, IMAGE):
            os.utime(host.state / "images" / f"{digest[7:]}.json", (1, 1))
        explained = {a.name: a for a in (await client.get_accounts()).accounts}
        done = (await client.collect_garbage()).done
        held = {i.digest for i in (await client.list_images()).images}

        assert not explained[first[7:]].stays
        assert "it was not used for" in explained[first[7:]].why
        assert held == {second, OTHER_IMAGE}
        assert len(done) == 3  # two images and the layer of one
        assert len(list((host.state / "layers").glob("*.json"))) == 2
        assert (host.state / "tasks" / "web" / "base").read_text() == "b"
        await at_rest(client)


@pytest.mark.behaviour("BUG-AG77")
async def test_the_age_of_an_image_counts_from_the_end_of_its_last_task(host: FakeHost) -> None:
    """Formerly an image whose task had run for a week was removed minutes after its end."""
    async with serving(host) as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        os.utime(host.state / "images" / f"{IMAGE[7:]}.json", (1, 1))
        await client.collect_garbage()
        await client.delete_task("web")
        await gone(client, "web")
        assert (await client.collect_garbage()).done == []


@pytest.mark.behaviour("BUG-AG78")
@pytest.mark.parametrize(
    ("wall_s", "boot_s", "is_kept"),
    [
        pytest.param(30 * DAY_S, 40 * DAY_S - 600, True, id="the clock was set to a later date"),
        pytest.param(30 * DAY_S, 10 * DAY_S, False, id="the time passed"),
        pytest.param(80 * DAY_S, 90 * DAY_S, True, id="the host was off"),
        pytest.param(-30 * DAY_S, 40 * DAY_S - 600, False, id="the clock was set back"),
    ],
)
async def test_only_time_in_which_the_host_was_up_makes_an_image_old(
    host: FakeHost, wall_s: float, boot_s: float, is_kept: bool
) -> None:
    """The last count was `wall_s` ago by the wall clock, `boot_s` after the boot of that time."""
    host.fake.boottime_s = lambda: 40 * DAY_S
    now, described = time.time(), host.state / "images" / f"{IMAGE[7:]}.json"
    async with serving(host) as client:
        os.utime(described, (now - 30 * DAY_S, now - 30 * DAY_S))
        (host.state / "clock").write_text(f"{now - wall_s!r} {boot_s!r}\n")
        done = (await client.collect_garbage()).done
        assert described.exists() == is_kept == (done == [])
        assert (await client.collect_garbage()).done == []
        await at_rest(client)


@pytest.mark.behaviour("BUG-AG83")
async def test_files_with_names_that_are_no_text_are_listed(host: FakeHost) -> None:
    """`gc --explain` and `fsck` failed with an internal error, and the events of the host, too."""
    state = os.fsencode(host.state)
    for folder in (b"journal", b"volumes"):
        os.makedirs(state + b"/" + folder, exist_ok=True)
    long = b"x" * 250
    for name in (
        b"caf\xe9",
        b"journal/caf\xe9.json",
        b"journal/%s.json" % long,
        b"journal/" + long,
    ):
        os.mknod(state + b"/" + name)
    os.mkdir(state + b"/volumes/caf\xe9")
    async with serving(host) as client:
        latest = (await client.get_events(0)).latest
        events = (await client.get_events(latest - 3)).events
        assert r"caf\udce9" in [event.object for event in events]
        assert r"caf\udce9" in [task.task_id for task in (await client.list_tasks()).tasks]
        found = await wrong(client)
        assert ("file", r"caf\udce9") in found
        assert ("record", r"caf\udce9.json") in found
        assert r"caf\udce9" in [a.name for a in (await client.repair_accounts()).accounts]


@pytest.mark.behaviour("BUG-AG84")
async def test_an_image_that_is_fetched_again_counts_as_used(host: FakeHost) -> None:
    """It could be removed between the answer that the host has it and the start of the task."""
    registry = Registry()
    host.fake.systemd.programs["skopeo"] = registry.skopeo
    layout = Layout(host.folder / "1")
    registry.push(PLACE + "1", layout, layout.image(files(app="1")))
    data = a_tar(app="2")
    host.config = replace(host.config, image_free_bytes=1 << 60)
    async with serving(host) as client:
        pulled = (await client.fetch_oci_image(PLACE + "1")).digest
        await client.put_image(digest_of(data), ImageFormat.TAR, chunks_of(data))
        again = (
            lambda: client.fetch_oci_image(PLACE + "1"),
            lambda: client.fetch_oci_image(f"{PLACE}1@{pulled}"),
            lambda: client.put_image(digest_of(data), ImageFormat.TAR, chunks_of(data)),
            lambda: client.pull_image(ImagePull(digest=digest_of(data), path="/")),
        )
        for fetch, digest in zip(
            again, (pulled, pulled, digest_of(data), digest_of(data)), strict=True
        ):
            os.utime(host.state / "images" / f"{digest[7:]}.json", (1, 1))
            await fetch()
            await client.collect_garbage()
            assert (await client.get_image(digest)).digest == digest


@pytest.mark.behaviour("BUG-AG69")
async def test_an_image_that_cannot_be_removed_keeps_no_other(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.give_image(OTHER_IMAGE)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == f"{IMAGE[7:]}.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, missing_ok)

    async with serving(host) as client:
        for digest in (IMAGE, OTHER_IMAGE):
            os.utime(host.state / "images" / f"{digest[7:]}.json", (1, 1))
        monkeypatch.setattr(Path, "unlink", refuse)
        done = (await client.collect_garbage()).done
        assert [line.split(" is removed")[0] for line in done] == [f"image {OTHER_IMAGE}"]
        with pytest.raises(HostError, match=f"cannot delete image {IMAGE}: Input/output error"):
            await client.delete_image(IMAGE)
        monkeypatch.undo()


@pytest.mark.behaviour("F-33")
async def test_a_short_disk_removes_unused_images(host: FakeHost) -> None:
    host.config = replace(host.config, image_free_bytes=host.fake.btrfs.available_bytes + 1)
    async with serving(host) as client:
        os.utime(host.state / "images" / f"{IMAGE[7:]}.json", (1, 1))
        done = (await client.collect_garbage()).done
    assert len(done) == 1
    assert not (host.state / "images" / IMAGE[7:]).exists()
