"""Front ends as processes next to a core and a shard: real processes on a real etcd."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.people import Outcome
from control_plane.client import ControlPlaneClient
from control_plane.identity.authority import CertificateSubject, open_authority
from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import RegionOfProcesses, region_of_processes
from wire import tls
from wire.errors import Busy, Forbidden, TwineError


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


def user(region: RegionOfProcesses, where: str, name: str) -> ControlPlaneClient:
    """Return a client of a user at a front end, or at the core."""
    authority = open_authority(region.folder / "core" / "authority.pem", "twine")
    held = authority.credential(CertificateSubject("user", name), "", 600.0)
    return ControlPlaneClient(region.url(where), tls.client_context(held, tls.API_SERVERS))


@pytest.mark.behaviour("FE2", "FE3", "FE5")
async def test_two_front_ends_behind_one_core_serve_users_and_outlive_it(
    one: Cluster, tmp_path: Path
) -> None:
    """One front end is killed, then the core; each user keeps the same rights.

    The core keeps the audit log, which has everything that a front end needs to remember.
    """
    async with region_of_processes(tmp_path, one, 2) as region:
        await region.join(2)
        image = await region.image()
        spec = EntitlementSpec(machines=1, host_profile="web", owners=["user:ann"])
        await region.client.put_entitlement("e1", spec)
        await region.client.move_entitlement("e1", 1)
        await region.run("j1", "e1", 1, image)
        fronts = [region.front_end(name) for name in ("front1", "front2")]
        for front in fronts:
            front.start()
        for front in fronts:
            await front.until_logged("serving at")
        before, core = region.started(), region.processes[0]
        async with user(region, "front1", "ann") as ann, user(region, "front2", "ann") as too:
            written = (await ann.get_job("j1")).record.spec
            assert written == (await too.get_job("j1")).record.spec
            with pytest.raises(Forbidden, match="ann is not an operator"):
                await ann.put_entitlement("e2", spec)
            assert [one.record.name for one in (await too.list_jobs()).jobs] == ["j1"]
            fronts[0].end(signal.SIGKILL)
            await too.stop_job("j1")
            assert len((await region.client.list_entitlements()).entitlements) == 1
            core.end(signal.SIGKILL)
            with pytest.raises(Busy, match="the core did not answer"):
                await too.list_jobs()
            core.start()

            async def is_back() -> bool:
                await too.list_jobs()
                return True

            await region.until(is_back, "the front end reaches the core again")
        audited = (await region.client.list_audit(who="ann")).entries
        assert [(of.action, of.object, of.outcome) for of in audited] == [
            ("stop_job", "job/j1", Outcome.DONE),
            ("put_entitlement", "entitlement/e2", Outcome.REFUSED),
        ]
        assert region.started() == before


@pytest.mark.behaviour("F-79")
async def test_a_front_end_has_no_right_but_to_speak_for_users(
    one: Cluster, tmp_path: Path
) -> None:
    """The front end's own credential reads nothing of the core, and no shard accepts it."""
    async with region_of_processes(tmp_path, one, 2) as region:
        region.front_end("front1")
        held = tls.load(tmp_path / "front1.credential")
        assert held.name == "front-end"
        context = tls.client_context(held, tls.CONTROL_PLANE)
        async with ControlPlaneClient(region.url("core"), context) as client:
            for work in (client.list_jobs(), client.list_images(), client.get_roots()):
                with pytest.raises(Forbidden, match="may call for users only"):
                    await work
        async with ControlPlaneClient(
            region.url("shard1"), tls.client_context(held, "/component/shard-1")
        ) as client:
            with pytest.raises(TwineError, match="/component/control-plane"):
                await client.list_jobs()
