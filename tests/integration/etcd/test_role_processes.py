"""Roles as processes: a core and shards on a real etcd, with agents on machines in memory."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from control_plane.api.shard_routes import SHARD_ROUTES
from control_plane.client import ControlPlaneClient
from control_plane.identity.authority import CertificateSubject, open_authority
from tests.etcd import Cluster, etcd_cluster
from tests.role_processes import PlaneProcess, RegionOfProcesses, region_of_processes, used
from wire import tls
from wire.client import WireClient
from wire.errors import Busy, Forbidden, NotFound, TwineError, Unreachable

HOSTS = 6


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


async def with_jobs(region: RegionOfProcesses) -> None:
    """Give each of two shards an entitlement of three machines with a job."""
    await region.join(HOSTS)
    image = await region.image()
    for number in (1, 2):
        await region.entitle(f"e{number}", 3, number)
        await region.run(f"j{number}", f"e{number}", 3, image)


async def refused(region: RegionOfProcesses, job: str) -> TwineError:
    """Return the error with which a request about a job is refused, once it is."""
    found: list[TwineError] = []

    async def is_refused() -> bool:
        try:
            await region.client.get_job(job)
        except TwineError as e:
            found.append(e)
        return bool(found)

    await region.until(is_refused, f"requests about {job} are refused")
    return found[0]


@pytest.mark.behaviour("AV7", "FE3")
async def test_an_unavailable_shard_fails_only_its_own_jobs_and_restarts_no_task(
    one: Cluster, tmp_path: Path
) -> None:
    """One of two shard processes is killed and restarted."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        before, killed = region.started(), region.processes[1]
        killed.end(signal.SIGKILL)
        error = await refused(region, "j1")
        assert error.retryable
        assert "shard 1 is unavailable" in str(error)
        assert await region.is_stable("j2")
        await region.client.change_job("restart", "j2")

        async def all_restarted() -> bool:
            return len([unit for unit in region.started() if "j2" in unit]) == 6

        await region.until(all_restarted, "the other shard continues")
        await region.until(lambda: region.is_stable("j2"), "the other shard is stable")
        listed = {status.record.name: status for status in (await region.client.list_jobs()).jobs}
        assert sorted(listed) == ["j1", "j2"]
        assert "shard 1 is unavailable" in listed["j1"].detail
        endpoints = await region.client.endpoints("j1")
        assert len(endpoints.endpoints) == 3, "discovery answers from the store"
        after = region.started()
        killed.start()
        await region.until(lambda: region.is_stable("j1"), "the shard is back")
        assert [unit for unit in region.started() if "j1" in unit] == [
            unit for unit in before if "j1" in unit
        ]
        assert region.started() == after


@pytest.mark.behaviour("SH7", "AV7")
async def test_shards_finish_begun_work_while_the_only_core_is_down(
    one: Cluster, tmp_path: Path
) -> None:
    """Requests between a shard and its hosts neither pass through the core nor wait for it."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        for job in ("j1", "j2"):
            await region.client.change_job("restart", job)
        core = region.processes[0]
        core.end(signal.SIGKILL)
        assert len(region.started()) < 2 * HOSTS, "restarts continue, one task of a job at a time"

        async def all_restarted() -> bool:
            return len(region.started()) == 2 * HOSTS

        await region.until(all_restarted, "shards restart the rest by themselves")
        core.start()
        for job in ("j1", "j2"):
            await region.until(partial(region.is_stable, job), f"{job} is stable")
        assert len(region.started()) == 2 * HOSTS, "the core that is back starts nothing again"


@pytest.mark.behaviour("SH3", "SH4", "FE2", "WH8")
async def test_an_entitlement_moves_between_running_processes_and_no_task_restarts(
    one: Cluster, tmp_path: Path
) -> None:
    """The entitlement moves to the other shard, to the core's, and back; clients send requests
    constantly.
    """
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        before, errors, ends = region.started(), list[TwineError](), asyncio.Event()

        async def ask() -> None:
            async with ControlPlaneClient(f"unix:{region.socket}") as client:
                while not ends.is_set():
                    try:
                        assert (await client.get_job("j1")).record.name == "j1"
                    except TwineError as e:
                        errors.append(e)
                    await asyncio.sleep(0.01)

        requesting = asyncio.create_task(ask())
        terms = [(await region.client.list_shards()).term]
        for to in (2, 0, 1):
            moved = await region.client.move_entitlement("e1", to)
            assert (moved.done, moved.to_shard) == (True, to)
            await region.until(lambda: region.is_stable("j1"), "the job is stable there")
            terms.append((await region.client.list_shards()).term)
        ends.set()
        await requesting
        assert terms == sorted(set(terms)), "each move raises the term"
        assert all(isinstance(error, Busy) and error.retryable for error in errors), errors
        assert region.started() == before
        await region.run("j1", "e1", 2, await region.image())
        assert len((await region.client.get_job("j1")).record.tasks) == 2


@pytest.mark.behaviour("SH4")
async def test_a_move_from_a_shard_that_is_away_changes_nothing(
    one: Cluster, tmp_path: Path
) -> None:
    """A shard that does not release an entitlement keeps it, even if both processes end."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        before, (core, first, _) = region.started(), region.processes
        first.send(signal.SIGSTOP)
        moving = asyncio.create_task(region.client.move_entitlement("e1", 2))

        async def is_announced() -> bool:
            return (await region.client.list_shards()).shards[2].moving == ["e1"]

        await region.until(is_announced, "the move is announced")
        core.end(signal.SIGKILL)
        with pytest.raises(TwineError):
            await moving
        first.end(signal.SIGKILL)  # its lease may have ended meanwhile
        core.start()
        first.start()
        await region.until(lambda: region.is_stable("j1"), "the entitlement is where it was")
        loads = (await region.client.list_shards()).shards
        assert [load.entitlements for load in loads] == [[], ["e1"], ["e2"]]
        assert not any(load.moving for load in loads)
        await region.client.move_entitlement("e1", 2)
        await region.until(lambda: region.is_stable("j1"), "it can be moved afterwards")
        assert region.started() == before


def replica(region: RegionOfProcesses) -> PlaneProcess:
    """Start a second process of shard 1."""
    made = region.made("shard1b", "shard", 1)
    made.start()
    return made


@pytest.mark.behaviour("AV1", "AV14")
async def test_a_second_process_of_a_shard_takes_over_when_the_first_is_killed(
    one: Cluster, tmp_path: Path
) -> None:
    """The standby uses no more CPU than the leader before that."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        second, before = replica(region), region.started()
        await second.until_logged("standing by")
        led, in_standby = used(region.processes[1]), used(second)
        assert in_standby[0] < led[0], "CPU since it started"
        assert in_standby[1] < led[1], "memory"
        term = (await region.client.list_shards()).term
        region.processes[1].end(signal.SIGKILL)
        await second.until_logged("serving at")
        await region.until(lambda: region.is_stable("j1"), "the second process leads")
        assert (await region.client.list_shards()).term > term
        assert region.started() == before
        await region.client.stop_job("j1")

        async def is_gone() -> bool:
            try:
                await region.client.get_job("j1")
            except NotFound:
                return True
            return False

        await region.until(is_gone, "hosts obey the new leader")


@pytest.mark.behaviour("AV2")
async def test_a_resumed_shard_leader_is_refused_and_ends(one: Cluster, tmp_path: Path) -> None:
    """The process is no longer the leader when it resumes, and reports that."""
    async with region_of_processes(tmp_path, one, 3) as region:
        await with_jobs(region)
        second, first = replica(region), region.processes[1]
        await second.until_logged("standing by")
        before = region.started()
        first.send(signal.SIGSTOP)
        await second.until_logged("serving at")
        await region.until(lambda: region.is_stable("j1"), "the second process leads")
        first.send(signal.SIGCONT)
        assert first.process is not None
        assert await asyncio.to_thread(first.process.wait, 180) == Busy.exit_code
        assert first.has_logged("lead")
        assert await region.is_stable("j1")
        assert region.started() == before


@pytest.mark.behaviour("SH1")
async def test_processes_that_do_not_go_together_do_not_start(one: Cluster, tmp_path: Path) -> None:
    """All roles in one process next to shards in others would be two owners."""
    async with region_of_processes(tmp_path, one, 2, ttl_s=60) as region:
        whole = region.made("whole", "all")
        core, shard = region.processes[:2]
        core.end(signal.SIGTERM)
        shard.send(signal.SIGSTOP)  # its lease lasts for another minute
        whole.start()
        assert whole.process is not None
        assert await asyncio.to_thread(whole.process.wait, 180) == Busy.exit_code
        assert whole.has_logged("shard-1")
        shard.send(signal.SIGCONT)
        assert shard.process is not None
        assert await asyncio.to_thread(shard.process.wait, 180) == Busy.exit_code
        assert shard.has_logged("--role all leads")
        shard.start()
        assert shard.process is not None
        assert await asyncio.to_thread(shard.process.wait, 180) == Busy.exit_code
        assert shard.has_logged("--role core")


@pytest.mark.behaviour("F-79")
async def test_only_the_core_may_call_the_process_of_a_shard(one: Cluster, tmp_path: Path) -> None:
    """Every kind of caller calls every route of a shard; the core authorises users."""
    async with region_of_processes(tmp_path, one, 2) as region:
        authority = open_authority(tmp_path / "core" / "authority.pem", "twine")
        callers = [
            *(("user", "root"), ("host", "h1"), ("controller", "c")),
            *(("component", "shard-1"), ("component", "shard-2"), ("component", "x")),
        ]
        for role, name in callers:
            held = authority.credential(CertificateSubject(role, name), "", 600.0)
            context = tls.client_context(held, "/component/shard-1")
            async with WireClient(region.url("shard1"), context) as client:
                for route in SHARD_ROUTES:
                    given = dict.fromkeys(route.parameters, "x")
                    with pytest.raises(Forbidden, match="/component/control-plane"):
                        await client.call(route, None, **given)
        context = tls.pinned_context(authority.ca_pem, "/component/shard-1")
        route = next(route for route in SHARD_ROUTES if route.name == "readyz")
        async with WireClient(region.url("shard1"), context) as client:
            with pytest.raises(Unreachable):
                await client.call(route)
        held = authority.credential(CertificateSubject("component", "control-plane"), "", 600.0)
        context = tls.client_context(held, "/component/shard-1")
        async with WireClient(region.url("shard1"), context) as client:
            assert (await client.call(route)).ok
