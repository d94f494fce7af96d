"""What a follower knows at which moment, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import pytest
from test_dns import an_endpoint
from virtual_time import run

from control_plane.api.endpoints import Endpoints
from control_plane.api.watch import MAX_JOBS_WATCHED, EndpointChanges
from resolver.endpoint_follower import IDLE_S, EndpointFollower
from wire.errors import Busy, Unreachable


class Front:
    """A front end that answers from a dict of job → endpoints, and can be unavailable."""

    def __init__(self) -> None:
        self.jobs: dict[str, Endpoints] = {}
        self.away = False
        self.latency_s = 0.0
        self.calls: list[dict[str, int | None]] = []

    def serve(self, job: str, revision: int, *hosts: str) -> None:
        listed = [an_endpoint(i, host, job) for i, host in enumerate(hosts)]
        self.jobs[job] = Endpoints(job=job, revision=revision, endpoints=listed)

    async def watch(self, known: Mapping[str, int | None], wait_s: float) -> EndpointChanges:
        self.calls.append(dict(known))
        await asyncio.sleep(self.latency_s)
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            if self.away:
                raise Unreachable("it is away")
            at = {job: self.jobs[job].revision if job in self.jobs else 0 for job in known}
            news = [job for job in known if at[job] != known[job]]
            if news or asyncio.get_running_loop().time() >= end:
                return EndpointChanges(
                    changed=[self.jobs[job] for job in news if job in self.jobs],
                    missing=[job for job in news if job not in self.jobs],
                )
            await asyncio.sleep(0.1)


def following(scenario) -> None:
    async def main() -> None:
        front = Front()
        notified = []
        follower = EndpointFollower(front.watch, lambda: notified.append(None))
        task = asyncio.create_task(follower.run())
        try:
            await scenario(front, follower)
        finally:
            task.cancel()

    run(main())


def hosts(found: Endpoints | None) -> list[str]:
    assert found is not None
    return [e.host for e in found.endpoints]


def test_a_job_is_followed_from_the_first_request():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.serve("web", 1, "a")
        assert hosts(await follower.get("web", 2)) == ["a"]
        front.serve("web", 2, "a", "b")
        await asyncio.sleep(1)
        assert hosts(await follower.get("web")) == ["a", "b"]

    following(scenario)


def test_a_job_that_is_added_does_not_wait_behind_those_that_do_not_change():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.serve("web", 1, "a")
        front.serve("api", 1, "b")
        await follower.get("web", 2)
        await asyncio.sleep(5)  # a call for `web` waits for changes now
        assert hosts(await follower.get("api", 2)) == ["b"]

    following(scenario)


def test_a_job_that_is_created_and_deleted_is_followed():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        assert await follower.get("web", 2) is None
        front.serve("web", 7, "a")
        await asyncio.sleep(1)
        assert hosts(await follower.get("web")) == ["a"]
        del front.jobs["web"]
        await asyncio.sleep(1)
        assert await follower.get("web") is None

    following(scenario)


def test_last_known_records_are_served_while_the_control_plane_is_down():
    """Clients keep the records that they had before the outage."""

    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.serve("web", 1, "a")
        await follower.get("web", 2)
        front.away = True
        await asyncio.sleep(3600)
        assert hosts(await follower.get("web")) == ["a"]
        with pytest.raises(Busy, match="it is away"):
            await follower.get("api", 2)
        assert len(front.calls) < 3600  # the follower calls at growing intervals
        front.away = False
        front.serve("web", 2, "b")
        await asyncio.sleep(10)
        assert hosts(await follower.get("web")) == ["b"]
        assert follower.failing == ""

    following(scenario)


def test_a_job_without_requests_is_no_longer_followed():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.serve("web", 1, "a")
        front.serve("api", 1, "a")
        await follower.get("web", 2)
        await follower.get("api", 2)
        for _ in range(int(IDLE_S) // 10 + 10):
            await asyncio.sleep(10)
            await follower.get("api")
        assert set(front.calls[-1]) == {"api"}

    following(scenario)


def test_more_jobs_than_one_call_takes_are_refused():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        for i in range(MAX_JOBS_WATCHED):
            front.serve(f"job{i}", 1)
            assert hosts(await follower.get(f"job{i}", 2)) == []
        with pytest.raises(Busy, match="followed already"):
            await follower.get("one-more", 2)

    following(scenario)


@pytest.mark.behaviour("BUG-AG113")
def test_a_flood_of_names_does_not_stop_the_answers():
    """A new name every 10 ms, and a control plane that takes 50 ms to answer."""

    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.latency_s = 0.05
        front.serve("web", 1, "a")

        async def flood() -> None:
            for i in range(MAX_JOBS_WATCHED):
                with suppress(Busy):
                    await follower.get(f"invented{i}")
                await asyncio.sleep(0.01)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.1)
        assert hosts(await follower.get("web", 1)) == ["a"]
        front.serve("web", 2, "b")
        await asyncio.sleep(1)
        assert hosts(await follower.get("web")) == ["b"]
        await flooding

    following(scenario)


@pytest.mark.behaviour("BUG-AG63")
def test_invented_names_do_not_keep_clients_from_jobs():
    async def scenario(front: Front, follower: EndpointFollower) -> None:
        front.serve("web", 1, "a")
        front.serve("api", 1, "b")
        assert hosts(await follower.get("web", 2)) == ["a"]
        for i in range(MAX_JOBS_WATCHED):
            assert await follower.get(f"invented{i}", 2) is None
        assert hosts(await follower.get("api", 2)) == ["b"]
        assert hosts(await follower.get("web")) == ["a"]

    following(scenario)
