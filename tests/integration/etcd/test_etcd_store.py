"""The store in etcd under faults of its members, and control planes that take over."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control_plane.api.people import GroupSpec
from control_plane.client import ControlPlaneClient
from control_plane.config import EtcdSettings
from control_plane.store import Compacted, Delete, Entry, Put
from control_plane.store import etcd_pb2 as pb
from control_plane.store.bounds import VALUE_MAX
from control_plane.store.etcd import EtcdStore
from control_plane.store.etcd_client import EtcdClient
from control_plane.store.feed import Feed
from control_plane.store.outcomes import Slots, WriteAttempt
from tests.etcd import Cluster, Replica, etcd_cluster
from wire.errors import Busy, UnknownOutcome, Unprocessable

PATIENCE_S = 60


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with etcd_cluster(3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_members_serve(three: Cluster) -> None:
    """Restart the members that a failed test left dead."""
    for member in three.members:
        member.start()
    three.wait()


@pytest.fixture
def settings(three: Cluster, tmp_path: Path) -> EtcdSettings:
    return EtcdSettings(endpoints=three.urls, prefix=f"/{tmp_path.name}", ttl_s=15, standby=False)


def short(settings: EtcdSettings) -> EtcdSettings:
    """Yield a store with a short lease, which may end when a member dies."""
    return msgspec.structs.replace(settings, ttl_s=2)


def standby(settings: EtcdSettings) -> EtcdSettings:
    return msgspec.structs.replace(settings, standby=True)


async def written(store: EtcdStore, number: int) -> int:
    """Write one key, and find out the outcome of an unanswered write."""
    slots = Slots(store, f"lane{number}")
    while True:
        try:
            return await WriteAttempt(
                slots, {}, [Put(f"k/{number}", b"%d" % number)]
            ).make_and_confirm()
        except (Busy, UnknownOutcome):
            await asyncio.sleep(0.1)


@pytest.mark.behaviour("AV1")
async def test_no_acknowledged_write_is_lost_when_the_members_die_in_turn(
    three: Cluster, settings: EtcdSettings
) -> None:
    """Each of three members is killed in turn while 20 writers continue."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        for turn, member in enumerate(three.members):
            numbers = range(turn * 20, turn * 20 + 20)
            writing = [asyncio.ensure_future(written(store, n)) for n in numbers]
            member.kill()
            revisions = dict(zip(numbers, await asyncio.gather(*writing), strict=True))
            member.start()
            await asyncio.to_thread(three.wait)
            found = {e.key: e for e in (await store.list_prefix("k/")).entries}
            assert {
                f"k/{n}": Entry(f"k/{n}", b"%d" % n, at) for n, at in revisions.items()
            }.items() <= found.items()
        assert store.failure() == ""


@pytest.mark.behaviour("AV2")
async def test_a_minority_refuses_writes_with_an_error_until_the_majority_returns(
    three: Cluster, settings: EtcdSettings
) -> None:
    """One member of three acknowledges nothing; the leader stops before its lease ends."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(short(settings)) as store:
        revision = await store.txn({}, [Put("a", b"1")])
        for member in three.members[:2]:
            member.kill()
        with pytest.raises((UnknownOutcome, Busy)):
            await store.txn({"a": revision}, [Put("a", b"2")])
        while not store.failure():
            await asyncio.sleep(0.05)
        with pytest.raises(Busy, match="lease"):
            await store.txn({}, [Put("b", b"")])
        with pytest.raises(Busy, match="no longer leads"):
            await store.wait_failed()
        for member in three.members[:2]:
            member.start()
        await asyncio.to_thread(three.wait)
    async with asyncio.timeout(PATIENCE_S), EtcdStore(standby(settings)) as store:
        assert (await store.get("a")).value in (b"1", b"2")
        assert await store.get("b") is None


@pytest.mark.behaviour("AV2")
async def test_a_paused_leader_is_replaced_and_its_writes_are_refused(
    settings: EtcdSettings,
) -> None:
    """A write that the leader sends before it reads its own clock is refused, too."""
    settings = short(settings)
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as first:
        revision = await first.txn({}, [Put("a", b"first")])
        first._leadership._renewing.cancel()  # a pause: no lease is renewed
        async with EtcdStore(standby(settings)) as second:
            assert second.epoch() == first.epoch() + 1
            assert await second.txn({"a": revision}, [Put("a", b"second")]) > revision
            assert first.failure() != ""
            first._leadership._good_until = float("inf")
            first._leadership.lost = asyncio.get_running_loop().create_future()
            with pytest.raises(Busy, match="another control plane leads"):
                await first.txn({}, [Put("a", b"late")])
            assert (await second.get("a")).value == b"second"


@pytest.mark.behaviour("BUG-CP58")
async def test_a_process_paused_in_its_election_is_elected_again(
    settings: EtcdSettings,
) -> None:
    """Regression: its answer came after its lease had ended, and it loaded the store and began to
    serve.
    """
    paused_s = [0.0]

    class PausedOnce(EtcdClient):
        async def write(self, request: pb.TxnRequest) -> pb.TxnResponse:
            answer = await super().write(request)
            paused_s[0] = paused_s[0] or settings.ttl_s
            return answer

    settings = short(settings)
    store = EtcdStore(
        standby(settings), client=PausedOnce, clock=lambda: time.monotonic() + paused_s[0]
    )
    async with asyncio.timeout(PATIENCE_S), store:
        assert store.failure() == ""
        assert store.epoch() == 2
        await store.txn({}, [Put("a", b"1")])


async def test_a_watch_continues_when_its_member_dies(
    three: Cluster, settings: EtcdSettings
) -> None:
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        begin = await store.txn({}, [Put("a", b"0")])
        seen = store.watch("a", begin)
        for n, member in enumerate(three.members):
            member.kill()
            try:
                await store.txn({}, [Put("a", b"%d" % n)])
            except UnknownOutcome:
                await written(store, n)
                await store.txn({}, [Put("a", b"%d" % n)])
            while (await anext(seen)).value != b"%d" % n:
                pass
            member.start()
            await asyncio.to_thread(three.wait)


async def test_watchers_behind_a_compaction_list_again(settings: EtcdSettings) -> None:
    """Watchers notice every gap of compacted history."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        old = await store.txn({}, [Put("a", b"0")])
        new = await store.txn({}, [Put("a", b"1")])
        await store._client.read("KV/Compact", pb.CompactionRequest(revision=new))
        behind = Feed(old - 1, old - 1)
        following = asyncio.ensure_future(store._follow(behind))
        with pytest.raises(Compacted):
            await anext(behind.follow("", old - 1))
        last = await store.txn({}, [Put("a", b"2")])
        assert (await anext(behind.follow("", behind.compacted))).revision == last
        following.cancel()


@pytest.mark.behaviour("BUG-CP102")
async def test_a_gap_is_found_although_etcd_does_not_answer_for_a_moment(
    settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly this process saw no change of another process from then on."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        old = await store.txn({}, [Put("a", b"0")])
        new = await store.txn({}, [Put("a", b"1")])
        await store._client.read("KV/Compact", pb.CompactionRequest(revision=new))
        read, failures = store._client.read, [Busy("no member of etcd answers")]

        async def failing(call: str, request: object) -> object:
            if failures:
                raise failures.pop()
            return await read(call, request)

        monkeypatch.setattr(store._client, "read", failing)
        behind = Feed(old - 1, old - 1)
        following = asyncio.ensure_future(store._follow(behind))
        with pytest.raises(Compacted):
            await anext(behind.follow("", old - 1))
        assert not failures
        following.cancel()


@pytest.mark.behaviour("BUG-CP151")
async def test_a_process_whose_watch_failed_stops_leading(settings: EtcdSettings) -> None:
    """Formerly it continued to lead, and saw no change from then on."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        no_text = pb.PutRequest(key=store._data + b"a\xff", value=b"")
        await store._client.write(pb.TxnRequest(success=[pb.RequestOp(request_put=no_text)]))
        with pytest.raises(Busy, match="no longer leads: a loop of its store failed: UnicodeDec"):
            await store.wait_failed()
        with pytest.raises(Busy, match="cannot write"):
            await store.txn({}, [Put("a", b"0")])


@pytest.mark.behaviour("BUG-CP103")
async def test_a_value_that_is_too_large_is_an_error_of_the_request(
    settings: EtcdSettings,
) -> None:
    """Formerly a job with a long environment was an internal error."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        with pytest.raises(Unprocessable, match="cannot write jobs/web: it would have 262145 byt"):
            await store.txn({}, [Put("jobs/web", b"0" * (VALUE_MAX + 1))])
        await store.txn({}, [Put("jobs/web", b"0" * VALUE_MAX)])


async def test_a_list_of_many_keys_is_of_one_revision(settings: EtcdSettings) -> None:
    """The list has more keys than one call returns, and they change meanwhile."""
    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as store:
        for n in range(0, 2500, 100):
            await store.txn({}, [Put(f"k/{n + i:04}", b"0") for i in range(100)])
        listing, _ = await asyncio.gather(
            store.list_prefix("k/"), store.txn({}, [Put("k/0000", b"1"), Put("k/2499", b"1")])
        )
        assert len(listing.entries) == 2500
        assert listing.entries[0].value == listing.entries[-1].value


@pytest.mark.behaviour("AV1")
def test_a_standby_takes_over_with_all_acknowledged_writes(three: Cluster, tmp_path: Path) -> None:
    """Two control planes on one cluster; the leader is killed."""

    async def put(plane: Replica, name: str) -> None:
        async with ControlPlaneClient(f"unix:{plane.socket}") as client:
            await client.put_group(name, GroupSpec(members=["ann"]))

    async def names(plane: Replica) -> set[str]:
        async with ControlPlaneClient(f"unix:{plane.socket}") as client:
            return {group.name for group in (await client.list_groups()).groups}

    with ExitStack() as stack:
        first = Replica(tmp_path, "first", three.urls, prefix=f"/{tmp_path.name}")
        stack.callback(first.end)
        first.until("serving at")
        asyncio.run(put(first, "one"))
        (tmp_path / "second").mkdir()
        shutil.copy(first.state / "authority.pem", tmp_path / "second")
        second = Replica(tmp_path, "second", three.urls, prefix=f"/{tmp_path.name}")
        stack.callback(second.end)
        second.until("standing by")
        third = Replica(tmp_path, "third", three.urls, prefix=f"/{tmp_path.name}")
        stack.callback(third.end)
        third.until("standing by")
        assert third.end(signal.SIGTERM) == 0

        first.end()
        second.until("serving at")
        assert asyncio.run(names(second)) == {"one"}
        asyncio.run(put(second, "two"))
        assert second.end(signal.SIGTERM) == 0


@pytest.mark.behaviour("AV1")
async def test_a_standby_follows_the_store_and_reads_nothing_when_it_takes_over(
    settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers changes and deletions while it was a standby, also with a compaction."""
    ranges = list[bytes]()
    read = EtcdClient.read

    async def counted(self: EtcdClient, call: str, request: Any) -> Any:
        if call == "KV/Range":
            ranges.append(request.key)
        return await read(self, call, request)

    waiting, announced = asyncio.Event(), [Put("processes/x", b"1")]
    second = EtcdStore(
        standby(settings),
        standing_by=lambda _: waiting.set(),
        role="r",
        announce=lambda _: announced,
    )
    async with EtcdStore(settings, role="r") as first:
        for number in range(1500):
            await first.txn({}, [Put(f"a/{number:04}", b"0")])
            if number == 700:
                taking = asyncio.create_task(second.__aenter__())
                await waiting.wait()
        await first.compact(first.revision() - 5)
        await first.txn({}, [Put("a/0007", b"7"), Delete("a/0008"), Put("b", b"1")])
        last = await first.list_prefix("")
        copy = second._copy
        assert await copy.wait_reached(first.revision() - first._shift, PATIENCE_S)
    await taking
    try:
        monkeypatch.setattr(EtcdClient, "read", counted)
        listed = await second.list_prefix("")
        found = {entry.key: (entry.value, entry.revision) for entry in listed.entries}
        wanted = {entry.key: (entry.value, entry.revision) for entry in last.entries}
        assert found.pop("processes/x")[0] == b"1"
        assert found == wanted
        await second.txn({}, [Put("a/0001x", b"new"), Delete("a/0002")])
        page = await second.list_prefix("a/", "a/0000", 3)
        assert [entry.key for entry in page.entries] == ["a/0001", "a/0001x", "a/0003"]
        assert (await second.list_prefix("c/")).entries == ()
        assert ranges == [], "all of it came from the copy"
        await second._copy.end()
        assert [e.key for e in (await second.list_prefix("b")).entries] == ["b"]
        assert ranges != []
    finally:
        await second.__aexit__(None, None, None)
