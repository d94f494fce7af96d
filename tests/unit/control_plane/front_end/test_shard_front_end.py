"""AV7: a shard that no longer leads answers nothing, neither about a job nor in a merged list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.api.shard_routes import SHARD_ROUTES
from control_plane.front_end.shard_front_end import ShardFrontEnd
from wire.errors import Busy
from wire.fairness import Peer
from wire.server import Call

ROUTES = {route.name: route for route in SHARD_ROUTES}


class Door:
    """A door whose store may have lost its leadership."""

    def __init__(self) -> None:
        self.why = ""
        shards = SimpleNamespace(number_of_job=lambda _: 1, of_job=lambda _: None)
        rooms = dict.fromkeys(("task_service", "inventory", "intents"))
        plane: Any = SimpleNamespace(shards=shards, **rooms)
        store: Any = SimpleNamespace(failure=lambda: self.why)
        self._door = ShardFrontEnd(plane, store, "twine")

    async def ask(self, name: str) -> object:
        async def handler(_: Call) -> object:
            return "from old records"

        route = ROUTES[name]
        call = Call(route, Peer("core", "forwarded"), None, {"job": "web"}, {}, None, "1")
        setattr(self._door, name, handler)
        return await self._door.handler(route)(call)


@pytest.mark.parametrize("name", ["get_job", "list_jobs"])
async def test_a_shard_that_lost_its_lease_refuses_reads(name: str) -> None:
    door = Door()
    assert await door.ask(name) == "from old records"
    door.why = "the lease ended"
    with pytest.raises(Busy, match="cannot answer any more: the lease ended"):
        await door.ask(name)
