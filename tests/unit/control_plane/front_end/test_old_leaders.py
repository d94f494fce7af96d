"""A control plane that no longer leads returns nothing that it has read, including errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.api.routes import ROUTES
from control_plane.front_end.forwarding import Forwarding
from control_plane.front_end.frontend import FrontEnd
from wire.errors import Busy, NotFound
from wire.fairness import Peer
from wire.server import Call

pytestmark = pytest.mark.behaviour("AV1")

GET_JOB = next(route for route in ROUTES if route.name == "get_job")


class Leader:
    """A front end whose store may have lost its leadership."""

    def __init__(self) -> None:
        self.why = ""
        self.error: NotFound | None = None
        self._front_end = FrontEnd.__new__(FrontEnd)
        guard: Any = SimpleNamespace(check=lambda _: None)
        self._front_end._guard = guard
        self._front_end.store_failure = lambda: self.why

    async def ask(self) -> object:
        async def handler(_: Call) -> object:
            if self.error is not None:
                raise self.error
            return "from old records"

        recorder: Any = None
        call = Call(GET_JOB, Peer("user:ann", "user"), None, {"job": "web"}, {}, None, "1")
        return await self._front_end._guarded(GET_JOB, handler, recorder)(call)


async def test_a_control_plane_that_lost_its_lease_refuses_reads() -> None:
    leader = Leader()
    assert await leader.ask() == "from old records"
    leader.why = "the lease ended"
    with pytest.raises(Busy, match="can no longer answer: the lease ended"):
        await leader.ask()


async def test_a_control_plane_that_lost_its_lease_does_not_answer_not_found() -> None:
    leader = Leader()
    leader.error = NotFound("there is no job 'web'")
    with pytest.raises(NotFound):
        await leader.ask()
    leader.why = "the lease ended"
    with pytest.raises(Busy, match="can no longer answer: the lease ended"):
        await leader.ask()


class OtherShard:
    """A client of a shard's process that counts requests."""

    endpoint, shard, revision = "https://shard", 1, 0

    def __init__(self) -> None:
        self.requests = 0

    async def call(self, *_: object, **__: object) -> str:
        self.requests += 1
        return "done"


@pytest.mark.behaviour("BUG-CP66")
async def test_a_core_that_lost_its_lease_passes_no_request_on_to_a_shard() -> None:
    """Formerly the core passed requests on after a pause. A shard that did not know of the next
    core obeyed."""
    why, shard = [""], OtherShard()
    store = SimpleNamespace(failure=lambda: why[0])
    processes = SimpleNamespace(table=SimpleNamespace(store=store), url_of=lambda _: shard.endpoint)

    async def followed(*_: object) -> bool:
        return True

    plane: Any = SimpleNamespace(
        processes=processes,
        shards=SimpleNamespace(number_of_job=lambda _: 1),
        role=SimpleNamespace(runs=lambda _: False),
        maintenance=SimpleNamespace(previewer=SimpleNamespace()),
        followed=followed,
    )
    connect: Any = lambda *_: shard  # noqa: E731
    stop = next(route for route in ROUTES if route.name == "stop_job")
    handler = Forwarding(plane, connect).wrap(stop, unreachable)
    call = Call(stop, Peer("user:ann", "user"), None, {"job": "web"})
    assert await handler(call) == "done"
    why[0] = "the lease could not be renewed in time"
    with pytest.raises(Busy, match="passes on no request: the lease"):
        await handler(call)
    assert shard.requests == 1


async def unreachable(_: Call) -> object:
    """Replaces the handler of a process that does not run the shard. It must not be called."""
    raise AssertionError
