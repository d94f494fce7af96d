"""A shard that no longer leads does not answer, neither about a job nor in a merged list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.api.shard_routes import SHARD_ROUTES
from control_plane.front_end.shard_front_end import ShardFrontEnd
from wire.errors import Busy, NotFound
from wire.fairness import Peer
from wire.server import Call

pytestmark = pytest.mark.behaviour("AV7")

ROUTES = {route.name: route for route in SHARD_ROUTES}


class Shard:
    """A front end of a shard whose store may have lost its leadership."""

    def __init__(self) -> None:
        self.why, self.core = "", "first"
        self.error: NotFound | None = None
        shards = SimpleNamespace(number_of_job=lambda _: 1, of_job=lambda _: None)
        rooms = dict.fromkeys(("task_service", "inventory", "intents"))
        processes = SimpleNamespace(core_life=lambda: self.core)
        plane: Any = SimpleNamespace(
            shards=shards, processes=processes, followed=self._followed, **rooms
        )
        store: Any = SimpleNamespace(failure=lambda: self.why)
        self._front_end = ShardFrontEnd(plane, store, "twine")

    async def _followed(self, _revision: int, _seconds: float) -> bool:
        return True

    async def ask(self, name: str, core: str = "") -> object:
        """Send a request as a core does. A core of an earlier release does not send its name."""
        await self._front_end.follow(7, core)

        async def handler(_: Call) -> object:
            if self.error is not None:
                raise self.error
            return "from old records"

        route = ROUTES[name]
        body = SimpleNamespace(entitlement="demo")
        call = Call(route, Peer("core", "forwarded"), body, {"job": "web"}, {}, None, "1")
        setattr(self._front_end, name, handler)
        return await self._front_end.handler(route)(call)


@pytest.mark.parametrize("name", ["get_job", "list_jobs"])
async def test_a_shard_that_lost_its_lease_refuses_reads(name: str) -> None:
    shard = Shard()
    assert await shard.ask(name) == "from old records"
    shard.why = "the lease ended"
    with pytest.raises(Busy, match="can no longer answer: the lease ended"):
        await shard.ask(name)


@pytest.mark.behaviour("AV1", "AV7")
async def test_a_shard_that_lost_its_lease_does_not_answer_not_found() -> None:
    """Formerly "there is no such job" was also read from old records."""
    shard = Shard()
    shard.error = NotFound("there is no job 'web'")
    with pytest.raises(NotFound):
        await shard.ask("get_job")
    shard.why = "the lease ended"
    with pytest.raises(Busy, match="can no longer answer: the lease ended"):
        await shard.ask("get_job")


@pytest.mark.behaviour("BUG-CP57")
async def test_a_shard_refuses_requests_of_a_replaced_core() -> None:
    """Formerly a paused core forwarded a resize that overwrote a later one, granted by its
    successor."""
    shard = Shard()
    assert await shard.ask("apply_job", "first") == "from old records"
    shard.core = "second"
    with pytest.raises(Busy, match="this core no longer leads"):
        await shard.ask("apply_job", "first")
    assert await shard.ask("apply_job", "second") == "from old records"
    assert await shard.ask("apply_job") == "from old records", "a core of an earlier release"
