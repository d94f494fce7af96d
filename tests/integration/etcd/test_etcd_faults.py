"""Faults of etcd, its disk, its network, and pauses: control planes report nothing false.

`make store-faults PAUSE=60` pauses leaders for longer than CI does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.api.people import GroupSpec
from control_plane.client import ControlPlaneClient
from control_plane.config import EtcdSettings
from control_plane.store import Put
from control_plane.store.etcd import EtcdStore
from control_plane.store.outcomes import Slots, WriteAttempt
from tests.etcd import Cluster, Replica, etcd_cluster
from wire.errors import Busy, TwineError, UnknownOutcome

PATIENCE_S = 120
BEYOND_S = float(os.environ.get("TWINE_PAUSE_S", "1"))
"""Time for which a leader remains paused after its successor serves."""
SLOW_S = 0.5


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with etcd_cluster(3) as cluster:
        yield cluster


async def members(replica: Replica, group: str = "g") -> list[str]:
    """Return the members of a group, as a control plane reports them."""
    async with ControlPlaneClient(f"unix:{replica.socket}") as client:
        groups = (await client.list_groups()).groups
        return next(list(found.members) for found in groups if found.name == group)


async def put(replica: Replica, *names: str) -> None:
    async with ControlPlaneClient(f"unix:{replica.socket}") as client:
        await client.put_group("g", GroupSpec(members=list(names)))


def pair(stack: ExitStack, folder: Path, urls: list[str]) -> tuple[Replica, Replica]:
    """Return a leader and its standby."""
    made = []
    for name, text in (("first", "serving at"), ("second", "standing by")):
        if made:
            (folder / name).mkdir()
            shutil.copy(made[0].state / "authority.pem", folder / name)
        replica = Replica(folder, name, urls, ttl_s=2, prefix=f"/{folder.name}")
        stack.callback(replica.end)
        replica.until(text)
        made.append(replica)
    return made[0], made[1]


@pytest.mark.behaviour("AV2")
async def test_a_resumed_leader_sends_no_old_state_and_steps_down(
    three: Cluster, tmp_path: Path
) -> None:
    """Requests that waited in its socket meanwhile are not answered from stale records."""
    with ExitStack() as stack:
        first, second = await asyncio.to_thread(pair, stack, tmp_path, three.urls)
        await put(first, "before")
        first.process.send_signal(signal.SIGSTOP)
        reading = [asyncio.ensure_future(members(first)) for _ in range(20)]
        writing = asyncio.ensure_future(put(first, "late"))
        await asyncio.to_thread(second.until, "serving at")
        await put(second, "after")
        await asyncio.sleep(BEYOND_S)
        first.process.send_signal(signal.SIGCONT)
        answers = await asyncio.gather(*reading, writing, return_exceptions=True)
        assert all(isinstance(answer, TwineError) for answer in answers), answers
        assert await asyncio.to_thread(first.process.wait, PATIENCE_S) == Busy.exit_code
        assert await members(second) == ["after"]


@pytest.mark.behaviour("AV2")
async def test_a_cluster_that_answers_after_half_a_second_keeps_its_leader(
    three: Cluster, tmp_path: Path
) -> None:
    """A slow cluster is available: the lease is renewed, and no write or change is lost."""
    relay = Relay(three.urls[0])
    relay.answers_after_s = SLOW_S
    async with relay.running() as url, asyncio.timeout(PATIENCE_S):
        settings = EtcdSettings(endpoints=[url], prefix=f"/{tmp_path.name}", standby=False)
        async with EtcdStore(settings) as store:
            watch = store.watch("k/", store.revision())
            loop = asyncio.get_running_loop()
            until, seen = loop.time() + 2 * settings.ttl_s, 0
            while loop.time() < until:
                writes = [store.txn({}, [Put(f"k/{seen + n}", b"")]) for n in range(20)]
                assert len(set(await asyncio.gather(*writes))) == 20
                keys = {(await anext(watch)).key for _ in range(20)}
                assert keys == {f"k/{seen + n}" for n in range(20)}
                seen += 20
            assert store.failure() == ""


class Relay:
    """A relay to one member that can be slow, or drop one direction."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._member = host, int(port)
        self.answers_after_s = 0.0
        self.loses_answers = self.loses_requests = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Yield the URL at which it listens."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for task in self._tasks:
                task.cancel()
            for end in self._ends:
                end.close()
            closed = (end.wait_closed() for end in self._ends)
            await asyncio.gather(*self._tasks, *closed, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(*self._member)
        self._ends += [requests, writer]
        for work in (self._requests(reader, requests), self._answers(answers, writer)):
            self._tasks.add(asyncio.create_task(work))

    async def _requests(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self.loses_requests:
                to.write(data)
        to.close()

    async def _answers(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(1 << 16):
            if not self.loses_answers:
                loop.call_later(self.answers_after_s, to.write, data)
        loop.call_later(self.answers_after_s, to.close)


@pytest.mark.behaviour("AV2")
@pytest.mark.parametrize(("answers", "requests"), [(True, False), (False, True), (True, True)])
async def test_a_leader_that_is_cut_off_from_etcd_stops_before_another_leads(
    three: Cluster, tmp_path: Path, answers: bool, requests: bool
) -> None:
    """One or both directions are cut: an unanswered write is made or not, and never made later."""
    relay, prefix = Relay(three.urls[0]), f"/{tmp_path.name}"
    async with asyncio.timeout(PATIENCE_S), relay.running() as url:
        settings = EtcdSettings(endpoints=[url], prefix=prefix, ttl_s=2)
        other = EtcdSettings(endpoints=three.urls[1:], prefix=prefix, ttl_s=2)
        async with EtcdStore(settings) as first:
            revision = await first.txn({}, [Put("a", b"first")])
            relay.loses_answers, relay.loses_requests = answers, requests
            late = asyncio.ensure_future(first.txn({"a": revision}, [Put("a", b"late")]))
            async with EtcdStore(other) as second:
                assert first.failure() != ""
                entry = await second.get("a")
                assert entry is not None
                assert entry.value == (b"first" if requests else b"late")
                await second.txn({"a": entry.revision}, [Put("a", b"second")])
                relay.loses_answers = relay.loses_requests = False
                with pytest.raises((Busy, UnknownOutcome)):
                    await late
                with pytest.raises(Busy):
                    await first.txn({"a": revision}, [Put("a", b"later")])
                assert (await second.get("a")).value == b"second"


def ask(url: str, what: str, **words: object) -> Any:
    """Call a member's JSON gateway: not every host has etcdctl."""
    request = urllib.request.Request(f"{url}/v3/maintenance/{what}", json.dumps(words).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


async def use_up(store: EtcdStore) -> None:
    while True:
        await store.txn({}, [Put("k", os.urandom(100 << 10))])


@pytest.mark.behaviour("AV1")
async def test_a_cluster_whose_quota_is_used_up_refuses_writes_until_there_is_room(
    tmp_path: Path,
) -> None:
    """The leader stays, reads continue, the error names the remedy, and the remedy works."""
    with etcd_cluster(1, None, "--quota-backend-bytes", str(2 << 20)) as cluster:
        settings = EtcdSettings(endpoints=cluster.urls, standby=False)
        async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
            with pytest.raises(Busy, match="etcd accepts no writes") as refused:
                await use_up(store)
            assert "etcdctl alarm disarm" in refused.value.hint
            assert store.revision() > 5
            assert await store.get("k") is not None
            await asyncio.sleep(settings.ttl_s)  # the lease is still renewed
            assert store.failure() == ""
            await store.compact(store.revision())
            ask(cluster.urls[0], "defragment")
            for alarm in ask(cluster.urls[0], "alarm", action="GET")["alarms"]:
                ask(cluster.urls[0], "alarm", action="DEACTIVATE", **alarm)
            assert await store.txn({}, [Put("k", b"again")]) > 0


@pytest.mark.behaviour("AV1")
@pytest.mark.root
async def test_the_cluster_works_without_a_member_with_a_full_disk(tmp_path: Path) -> None:
    """etcd ends on that member. The other two take all writes, and none is lost."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=700m", "none", str(disk))
    try:
        with etcd_cluster(3, disk) as cluster:
            folder = next(disk.iterdir())
            small = folder / "m0"  # the first member gets a separate disk
            cluster.members[0].kill()
            kept = tmp_path / "kept"
            shutil.copytree(small, kept)
            run("mount", "-t", "tmpfs", "-o", "size=300m", "none", str(small))
            try:
                shutil.copytree(kept, small, dirs_exist_ok=True)
                small.chmod(0o700)
                cluster.members[0].start()
                cluster.wait()
                await fill_disk(cluster, small)
            finally:
                cluster.members[0].kill()
                run("umount", str(small))
    finally:
        run("umount", str(disk))


async def fill_disk(cluster: Cluster, small: Path) -> None:
    """Write while the first member's disk is full, until that member has ended."""
    settings = EtcdSettings(endpoints=cluster.urls, prefix="/full", standby=False, ttl_s=30)
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        slots, made = Slots(store, "lane"), {}
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        (small / "ballast").write_bytes(b"\0" * max(0, free - (1 << 20)))
        n = 0
        while cluster.members[0].running() or n < 50:
            try:
                value = os.urandom(64 << 10)
                revision = await WriteAttempt(
                    slots, {}, [Put(f"k/{n % 20}", value)]
                ).make_and_confirm()
                made[f"k/{n % 20}"] = revision, value
                n += 1
            except (Busy, UnknownOutcome):
                assert store.failure() == ""
                await asyncio.sleep(0.1)
        found = {e.key: (e.revision, e.value) for e in (await store.list_prefix("k/")).entries}
        assert found == made
        assert store.failure() == ""


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
