"""An entitlement with image keys runs only images signed by one of them; keys change meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import world
from fake_agents import IMAGE
from fake_agents import find_image as plain
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region

from agent.api import ImageInfo, ImageSignature
from control_plane.api.capacity import EntitlementSpec
from wire import signatures
from wire.errors import InvalidInput

KEY, OTHER = signatures.new_key(), signatures.new_key()
PUBLIC, STRANGE = signatures.public_key(KEY), signatures.public_key(OTHER)


class Store:
    """An image store whose images are signed by tests."""

    def __init__(self) -> None:
        self.signed: list[ImageSignature] = []

    def sign(self, pem: bytes, digest: str = IMAGE) -> None:
        key, made = signatures.sign(pem, "web/1", digest)
        self.signed = [ImageSignature(name="web/1", key=key, signature=made)]

    async def find(self, digest: str) -> ImageInfo | None:
        found = await plain(digest)
        return found and replace(found, signatures=self.signed)


def in_a_region_with_a_policy(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(world, "find_image", store.find)

    async def main() -> None:
        w = World(a_region())
        async with asyncio.timeout(20_000), w.running():
            await w.set_up(image_keys=[PUBLIC])
            await body(w, store)
        assert w.region.broken_rules == []

    run(main())


async def keys(w: World, *named: str) -> None:
    spec = EntitlementSpec(machines=3, host_profile="web", image_keys=list(named))
    await w.cp.capacity.put_entitlement("front", spec)


def trusted_keys(w: World) -> set[tuple[str, ...]]:
    """Return the keys that agents received, with each running task."""
    up = [m for m in w.region.machines.values() if m.on]
    specs = [spec for m in up for spec in m.specs.values()]
    assert all(spec.image_trust.signatures for spec in specs)
    return {tuple(spec.image_trust.keys) for spec in specs}


def test_a_job_with_an_unsigned_image_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(w: World, store: Store) -> None:
        for sign, why in (
            (lambda: None, "it has no signature"),
            (lambda: store.sign(OTHER), "only other keys signed it"),
            (lambda: store.sign(KEY, "sha256:" + "9" * 64), "does not match this image"),
        ):
            sign()
            with pytest.raises(InvalidInput, match=why) as refused:
                await w.cp.apply_job(a_job())
            assert [e.field for e in refused.value.errors] == ["image"]
            assert "twinectl image sign" in str(refused.value)
        store.sign(KEY)
        await w.cp.apply_job(a_job())
        await w.stable()
        assert trusted_keys(w) == {(PUBLIC,)}

    in_a_region_with_a_policy(body, monkeypatch)


def test_tasks_stay_when_their_key_goes_and_none_is_started_until_another_one_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(w: World, store: Store) -> None:
        store.sign(KEY)
        await w.cp.apply_job(a_job(3))
        await w.stable()
        assert (await w.cp.job_planner.explain("web")).image == ""
        starts = [list(m.starts) for m in w.region.machines.values()]

        await keys(w, STRANGE)
        await w.cp.restart_job("web")
        await asyncio.sleep(300)
        explained = await w.cp.job_planner.explain("web")
        assert "running tasks stay: image" in explained.image
        assert "only other keys signed it" in explained.image
        assert [list(m.starts) for m in w.region.machines.values()] == starts
        assert sum(w.alive().values()) == 3
        assert "the update waits: image" in (await w.cp.get_job("web")).detail

        w.region.machines["m1"].power_off()
        await asyncio.sleep(900)
        assert sum(w.alive().values()) == 2, "its successor is not started"
        waiting = (await w.cp.get_job("web")).record.tasks
        assert any("only other keys signed it" in task.reason for task in waiting)

        store.sign(OTHER)
        await w.until(lambda: sum(w.alive().values()) == 3, 900)
        await w.stable(within_s=900)
        assert trusted_keys(w) == {(STRANGE,)}
        assert (await w.cp.job_planner.explain("web")).image == ""

    in_a_region_with_a_policy(body, monkeypatch)
