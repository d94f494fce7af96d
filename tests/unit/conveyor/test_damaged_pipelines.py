"""One damaged record of the delivery service leaves its other pipelines at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.store import Put
from control_plane.store.records import DamagedRecord
from conveyor.api import StartRequest
from conveyor.client import ConveyorClient
from conveyor.records import PIPELINES, RUNS
from conveyor.runs import RunState
from conveyor.server import DeliveryAccess, serving
from tests.unit.conveyor.delivery_model import ModelJob, World, a_pipeline, digest
from wire.errors import ConfigError, NotFound, TwineError

pytestmark = pytest.mark.behaviour("CV4", "BUG-CP116")
DAMAGED = b"\x00 no record at all"
NEWER = b'{"schema":99}'


async def _with_damage(data: bytes = DAMAGED) -> World:
    """Return a service that starts on a store with pipelines `web` and `bad`."""
    world = await World().begin()
    world.plane.jobs["api"] = ModelJob()
    await world.service.apply(a_pipeline(name="bad", jobs=["api"]), "user:ann")
    await world.store.txn({}, [Put(f"{PIPELINES}bad", data)])
    world.restart()
    return world


async def test_a_damaged_pipeline_is_reported_and_the_others_are_carried_out(tmp_path: Path):
    world = await _with_damage()
    await world.service.load()
    world.plane.images["web"] = digest(2)
    assert (await world.until("done")).image == digest(2)

    async with (
        serving(world.service, DeliveryAccess(frozenset()), tmp_path / "c.sock"),
        ConveyorClient(f"unix:{tmp_path}/c.sock") as client,
    ):
        found = await client.list_pipelines()
        assert [one.record.spec.name for one in found.pipelines] == ["web"]
        assert list(found.damaged) == ["bad"]
        assert "cannot read pipelines/bad" in found.damaged["bad"]
        for refused in (
            client.get_pipeline("bad"),
            client.history("bad"),
            client.apply_pipeline(a_pipeline(name="bad", jobs=["api"])),
            client.start_run("bad", StartRequest(image=digest(3))),
        ):
            with pytest.raises(TwineError, match="pipelines/bad: the stored record is damaged"):
                await refused
    entry = await world.store.get(f"{PIPELINES}bad")
    assert entry is not None
    assert entry.value == DAMAGED


async def test_a_damaged_pipeline_can_be_removed_and_applied_again():
    world = await _with_damage()
    await world.service.load()
    await world.service.remove("bad")
    assert (await world.service.views()).damaged == {}
    with pytest.raises(NotFound):
        await world.service.remove("bad")
    view = await world.service.apply(a_pipeline(name="bad", jobs=["api"]), "user:ann")
    assert view.record.spec.jobs == ["api"]


async def test_a_pipeline_of_a_newer_release_is_no_damage():
    world = await _with_damage(NEWER)
    with pytest.raises(ConfigError, match="newer") as refused:
        await world.service.load()
    assert not isinstance(refused.value, DamagedRecord)


async def test_a_damaged_run_hides_no_pipeline_and_no_other_run():
    world = await World().begin()
    for number in (2, 3):
        world.plane.images["web"] = digest(number)
        await world.until("done")
    await world.store.txn({}, [Put(f"{RUNS}web/000002", DAMAGED)])
    world.restart()
    await world.service.load()
    view = await world.service.view("web")
    assert view.last is not None
    assert view.last.number == 1
    history = await world.service.history("web", 10, None)
    assert [run.number for run in history.runs] == [1]
    with pytest.raises(DamagedRecord, match="runs/web/000002"):
        await world.service.history("web", 10, 2)
    world.plane.images["web"] = digest(4)
    assert (await world.until("done")).state is RunState.DONE
