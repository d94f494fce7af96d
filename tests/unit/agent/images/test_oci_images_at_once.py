"""Pulls run at the same time as other pulls on their base and as garbage collection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import FakeHost
from oci import Layout, Registry, files, sha

from agent.client import AgentClient
from agent.machine.fake_systemd import Ended
from wire.errors import Conflict, NotFound, TwineError, Unreachable

BASE, APP, OTHER = files(base="base"), files(app="1"), files(app="2", other="x")
FIRST, SECOND = "registry.example/team/web:1", "registry.example/team/web:2"


@dataclass
class Held(Registry):
    """A registry that delays the fetch of some images until `release`."""

    holds: set[str] = field(default_factory=set)
    """`docker://…`, as in skopeo's arguments."""
    waiting: dict[str, tuple[list[str], Any]] = field(default_factory=dict)

    def skopeo(self, argv: list[str], properties: Any) -> Ended | None:
        """Run skopeo, or delay it if its image is held."""
        name = next(word for word in argv if word.startswith("docker://"))
        if "copy" in argv and name in self.holds:
            self.waiting[name] = argv, properties
            return None
        return super().skopeo(argv, properties)

    def release(self, host: FakeHost, *, code: int = 0) -> None:
        """End all waiting fetches, successfully unless `code` is an error."""
        waiting, self.waiting = self.waiting, {}
        self.holds.clear()
        for argv, properties in waiting.values():
            if not code:
                super().skopeo(argv, properties)
        for unit in host.fake.systemd.units("twine-fetch-*.service"):
            host.fake.systemd.exit(unit.unit, code)


@pytest.fixture
def registry(host: FakeHost) -> Held:
    registry = Held()
    host.fake.systemd.programs["skopeo"] = registry.skopeo
    return registry


def push(host: FakeHost, registry: Held, place: str, *layers: bytes, held: bool = False) -> str:
    """Push an image; return its digest."""
    layout = Layout(host.folder / f"layout-{place.rpartition(':')[2]}")
    digest = layout.image(*layers)
    registry.push(place, layout, digest)
    if held:
        registry.holds.add(f"docker://{place.rpartition(':')[0]}@{digest}")
    return digest


def layers_here(host: FakeHost) -> set[str]:
    return {p.stem for p in (host.state / "layers").glob("*.json")}


async def begun(registry: Held) -> None:
    """Return when a fetch of a held image has begun."""
    while not registry.waiting:
        await asyncio.sleep(0.01)


async def gone(client: AgentClient, digest: str) -> None:
    """Remove an image and everything that no other image uses."""
    await client.delete_image(digest)
    await client.collect_garbage()


async def test_the_base_of_an_image_that_is_being_fetched_is_not_collected(
    host: FakeHost, registry: Held
) -> None:
    """A pull does not fetch a layer that is present, so the layer must stay until the pull ends."""
    first = push(host, registry, FIRST, BASE, APP)
    push(host, registry, SECOND, BASE, OTHER, held=True)
    async with host.agent() as client, asyncio.timeout(20):
        await client.fetch_oci_image(FIRST)
        fetching = asyncio.create_task(client.fetch_oci_image(SECOND))
        await begun(registry)
        await gone(client, first)
        assert layers_here(host) == {sha(BASE)[7:]}, "of the first, its own layer alone went"
        registry.release(host)
        info = await fetching
        tree = host.state / "images" / info.digest[7:]
        assert (tree / "base").read_text() + (tree / "app").read_text() == "base2"
        await gone(client, info.digest)
        assert layers_here(host) == set(), "nothing is held once the image is there"


async def test_a_failed_pull_releases_the_layers_that_it_held(
    host: FakeHost, registry: Held
) -> None:
    first = push(host, registry, FIRST, BASE, APP)
    push(host, registry, SECOND, BASE, OTHER, held=True)
    async with host.agent() as client, asyncio.timeout(20):
        await client.fetch_oci_image(FIRST)
        fetching = asyncio.create_task(client.fetch_oci_image(SECOND))
        await begun(registry)
        registry.release(host, code=1)
        with pytest.raises(TwineError, match="cannot fetch"):
            await fetching
        await gone(client, first)
        assert layers_here(host) == set()


@pytest.mark.behaviour("AG3")
async def test_concurrent_pulls_with_one_base_download_it_once(
    host: FakeHost, registry: Held
) -> None:
    """Ten images that share a base cost one download of it."""
    places = [f"registry.example/team/web:{number}" for number in range(10)]
    for number, place in enumerate(places):
        push(host, registry, place, BASE, files(own=str(number)), held=number == 0)
    async with host.agent() as client, asyncio.timeout(30):
        first = asyncio.create_task(client.fetch_oci_image(places[0]))
        await begun(registry)
        after = (await client.get_events(0)).latest
        others = [asyncio.create_task(client.fetch_oci_image(place)) for place in places[1:]]
        waiting = set[str]()
        while len(waiting) < len(others):
            events = await client.get_events(after, wait_s=5)
            after = events.latest
            waiting |= {e.object for e in events.events if "another image fetches it" in e.message}
        assert registry.fetched == []
        registry.release(host)
        infos = await asyncio.gather(first, *others)
    assert len({info.digest for info in infos}) == 10
    assert len(registry.fetched) == len(set(registry.fetched)) == 21
    for number, info in enumerate(infos):
        assert (host.state / "images" / info.digest[7:] / "own").read_text() == str(number)


async def test_the_next_pull_downloads_the_base_if_the_first_fails(
    host: FakeHost, registry: Held
) -> None:
    push(host, registry, FIRST, BASE, APP, held=True)
    push(host, registry, SECOND, BASE, OTHER)
    async with host.agent() as client, asyncio.timeout(20):
        first = asyncio.create_task(client.fetch_oci_image(FIRST))
        await begun(registry)
        second = asyncio.create_task(client.fetch_oci_image(SECOND))
        registry.release(host, code=1)
        info = await second
        with pytest.raises(TwineError, match="cannot fetch"):
            await first
    assert (host.state / "images" / info.digest[7:] / "base").read_text() == "base"


@pytest.mark.behaviour("F-29")
async def test_a_stalled_fetch_is_given_up_and_does_not_block_its_base(
    host: FakeHost, registry: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """skopeo waits forever for a registry that stops sending."""
    monkeypatch.setattr("agent.images.sandbox.FETCH_IDLE_S", 0.2)
    push(host, registry, FIRST, BASE, APP, held=True)
    push(host, registry, SECOND, BASE, OTHER)
    async with host.agent() as client, asyncio.timeout(20):
        first = asyncio.create_task(client.fetch_oci_image(FIRST))
        await begun(registry)
        info = await client.fetch_oci_image(SECOND)
        with pytest.raises(Unreachable, match=r"cannot fetch .*: it stalled, no data for"):
            await first
    assert (host.state / "images" / info.digest[7:] / "base").read_text() == "base"
    assert list((host.state / "staging").iterdir()) == []


async def test_a_fetch_that_gets_something_is_waited_for(
    host: FakeHost, registry: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow registry is not stalled: the fetch continues while bytes arrive."""
    monkeypatch.setattr("agent.images.sandbox.FETCH_IDLE_S", 0.4)
    digest = push(host, registry, FIRST, BASE, APP, held=True)
    async with host.agent() as client, asyncio.timeout(20):
        fetching = asyncio.create_task(client.fetch_oci_image(FIRST))
        await begun(registry)
        ((argv, _),) = registry.waiting.values()
        coming = Path(argv[-1].removeprefix("oci:")) / "oci-put-blob"
        for size in range(1, 21):  # four times the longest allowed time without bytes
            coming.write_bytes(b"x" * size)
            await asyncio.sleep(0.08)
        coming.unlink()
        registry.release(host)
        assert (await fetching).digest == digest


@pytest.mark.behaviour("BUG-AG38")
async def test_a_pull_is_listed_and_can_be_cancelled(host: FakeHost, registry: Held) -> None:
    """An import whose client had disconnected continued, was not listed and could not be ended."""
    push(host, registry, FIRST, BASE, held=True)
    push(host, registry, SECOND, APP)
    async with host.agent() as client:
        await client.stage_image(FIRST)
        await begun(registry)
        (listed,) = (await client.list_imports()).images
        assert (listed.name, listed.began_at > 0) == (FIRST, True)

        waiting = asyncio.create_task(client.fetch_oci_image(FIRST))
        async with asyncio.timeout(10):
            while len((await client.list_imports()).images) < 2:
                await asyncio.sleep(0.01)
        assert (await client.cancel_import(FIRST)).detail == "2 cancelled"
        with pytest.raises(Conflict, match=f"the fetch of image {FIRST} was cancelled"):
            await waiting
        async with asyncio.timeout(10):
            while (await client.list_imports()).images:
                await asyncio.sleep(0.01)
        assert not host.fake.systemd.units("twine-fetch-*.service")
        assert not list((host.state / "staging").iterdir())
        with pytest.raises(NotFound, match="is not being fetched"):
            await client.cancel_import(FIRST)
        await client.fetch_oci_image(SECOND)
