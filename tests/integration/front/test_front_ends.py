"""Front ends as processes: what they may forward to a core, by route and by caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.api.routes import ROUTES
from control_plane.api.shard_routes import CALLER_HEADER
from control_plane.front_end.access import caller_header
from control_plane.front_end.relay import RELAYED, FrontEndRelay
from control_plane.identity.authority import CertificateSubject
from control_plane.runtime.runtime import Runtime
from wire import tls
from wire.client import WireClient
from wire.errors import Busy, Forbidden, TwineError, Unauthenticated
from wire.fairness import Peer
from wire.listen import serving, tcp_socket

from .conftest import Region, start_region
from .test_permissions import CALLERS, MAY_CALL, PATH, ROUTE, _furnish, _passes, _restore, body_of

pytestmark = pytest.mark.behaviour("F-79")

SPOKEN = {
    caller: CALLERS[caller] for caller in ("operator", "owner", "other owner", "viewer", "anyone")
}


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    for region in start_region(tmp_path_factory.mktemp("fronts")):
        asyncio.run(_furnish(region))
        yield region


class Speaking:
    """A region whose clients are a front end that names its user."""

    def __init__(self, region: Region, claimed: str = "") -> None:
        self._region, self._claimed = region, claimed
        self.control_plane = region.control_plane
        self.run = region.run

    def client(self, role: str, name: str) -> WireClient:
        peer = Peer(name=f"spiffe://twine/{role}/{name}", role=role, valid_from=2e9)
        if role == "anyone":
            peer = Peer(name="anyone", role="anyone")
        claimed = self._claimed or caller_header(peer)
        client = WireClient(self._region.url, self._region.context("component", "front-end"))
        client.headers = lambda: {CALLER_HEADER: claimed}
        return client


@pytest.mark.behaviour("FE3", "F-79")
@pytest.mark.parametrize("name", sorted(MAY_CALL))
def test_a_front_end_has_exactly_the_access_of_its_user(owned: Region, name: str) -> None:
    """A front end calls every route for every kind of user."""
    rule = MAY_CALL[name]
    allowed = rule if isinstance(rule, set) else rule[0]

    async def found() -> dict[str, bool]:
        speaker = Speaking(owned)
        return {caller: await _passes(speaker, ROUTE[name], caller, "web") for caller in SPOKEN}  # type: ignore[arg-type]

    assert asyncio.run(found()) == {caller: caller in allowed for caller in SPOKEN}


@pytest.mark.behaviour("F-79")
@pytest.mark.parametrize(
    "claimed",
    [
        "spiffe://twine/host/vm1 2000000000.0",
        "spiffe://twine/component/control-plane 2000000000.0",
        "local:0 2000000000.0",
        "spiffe://twine/user/root",
        "spiffe://twine/user/root nan",
        "spiffe://twine/user/root 2000000000.0 x",
        "user/root 2000000000.0",
        "x",
    ],
)
def test_a_front_end_forwards_requests_of_users_only(owned: Region, claimed: str) -> None:
    """A request without a user is refused, too."""

    async def main() -> None:
        for words in (claimed, ""):
            client = WireClient(owned.url, owned.context("component", "front-end"))
            client.headers = lambda words=words: {CALLER_HEADER: words} if words else {}  # type: ignore[misc]
            async with client:
                for name in ("list_jobs", "grant_operator", "renew", "fetch_image", "healthz"):
                    route = ROUTE[name]
                    given = {k: PATH.get(k, "x") for k in route.parameters}
                    with pytest.raises((Forbidden, Unauthenticated)):
                        await client.call(route, body_of(route, "web"), **given)

    asyncio.run(main())


@pytest.mark.behaviour("F-79")
def test_a_caller_header_from_other_callers_is_ignored(owned: Region) -> None:
    """The callers are a user, a host and another component, each with a front end's header."""

    async def main() -> None:
        for role, name in (("user", "vic"), ("host", "vm1"), ("component", "shard-1")):
            async with owned.client(role, name) as client:
                client.headers = lambda: {CALLER_HEADER: "spiffe://twine/user/root 2000000000.0"}
                with pytest.raises(Forbidden):
                    await client.call(ROUTE["grant_operator"], who="user:vic")

    asyncio.run(main())


@asynccontextmanager
async def a_front_end(
    region: Region, cores: list[str], runtime: Runtime | None = None
) -> AsyncIterator[str]:
    """Serve a front end of a region and yield its URL."""
    subject = CertificateSubject("component", "front-end", ("127.0.0.1",))
    held = region.authority.credential(subject, "", 600.0)
    tcp = tcp_socket("127.0.0.1", 0)
    core_tls = tls.client_context(held, tls.CONTROL_PLANE)
    relay = FrontEndRelay(cores, core_tls, "twine", runtime or Runtime())
    following = asyncio.create_task(relay.follow_core())
    context = tls.server_context(held, require_client=False)
    try:
        async with serving(relay.app("0.1.0"), tcp, context, None):
            yield f"https://127.0.0.1:{tcp.getsockname()[1]}"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await relay.close()


def user(region: Region, url: str, role: str, name: str) -> WireClient:
    held = region.authority.credential(CertificateSubject(role, name), url)
    return WireClient(url, tls.client_context(held, tls.API_SERVERS))


async def answer_of(client: WireClient, name: str) -> Any:
    """Return an answer; None while the front end's core is down."""
    try:
        return await client.call(ROUTE[name])
    except Busy:
        return None


@pytest.mark.behaviour("FE2", "FE3")
def test_users_of_a_front_end_get_the_core_answers_and_hosts_are_refused(owned: Region) -> None:
    """Covers answers, errors, streams and waiting calls; the second of two cores is the leader."""

    async def main() -> None:
        nowhere = "https://127.0.0.1:1"
        async with a_front_end(owned, [nowhere, owned.url]) as url:
            async with user(owned, url, "user", "ann") as ann:
                while (myself := await answer_of(ann, "get_current_user")) is None:
                    await asyncio.sleep(0.05)
                assert (myself.name, myself.owns) == ("ann", ["web"])
                jobs = await ann.call(ROUTE["list_jobs"])
                assert [one.record.name for one in jobs.jobs] == ["job-of-other", "job-of-web"]
                with pytest.raises(Forbidden, match="ann does not own entitlement 'other'"):
                    await ann.call(ROUTE["stop_job"], job="job-of-other")
                with pytest.raises(Forbidden, match="ann is not an operator"):
                    await ann.call(ROUTE["list_users"])
                logs = ann.stream(ROUTE["job_logs"], job="job-of-web", index="0")
                assert b"".join([chunk async for chunk in logs]) == b"one\ntwo\n"
                with pytest.raises(TwineError, match="there is no job"):
                    await ann.call(ROUTE["get_job"], job="nothing")
            async with user(owned, url, "host", "vm1") as host:
                with pytest.raises(Forbidden):
                    await host.call(ROUTE["get_endpoints"], job="job-of-web")
            async with user(owned, url, "component", "control-plane") as component:
                with pytest.raises(Forbidden):
                    await component.call(ROUTE["list_jobs"])

    asyncio.run(main())
    _restore(owned)


def test_routes_for_hosts_only_are_not_relayed() -> None:
    names = {route.name for route in RELAYED}
    hosts_only = {"join", "renew", "certify_task", "show_presence", "fetch_image"}
    assert {route.name for route in ROUTES} - names <= hosts_only
    assert not names & (hosts_only - {"fetch_image"})


@pytest.mark.behaviour("BUG-CP66")
def test_a_front_end_passes_on_no_change_from_before_its_pause(owned: Region) -> None:
    """Regression: it forwarded a change that its caller had sent again, and changed since."""

    async def main() -> None:
        passed_s = 0.0
        loop = asyncio.get_running_loop()
        runtime = Runtime(boot=lambda: loop.time() + passed_s)
        async with (
            a_front_end(owned, [owned.url], runtime) as url,
            user(owned, url, "user", "ann") as ann,
        ):
            pause = ROUTE["pause_job"]
            runtime.check_clocks()
            assert (await ann.call(pause, job="job-of-web")).record.paused
            passed_s = 60.0
            with pytest.raises(Busy, match="this front end was paused"):
                await ann.call(pause, job="job-of-web")
            assert (await ann.call(pause, job="job-of-web")).record.paused

    asyncio.run(main())
    _restore(owned)
