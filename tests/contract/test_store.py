"""The guarantees of the store to the control plane; each engine runs the same tests."""

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from control_plane.config import EtcdSettings
from control_plane.store import Compacted, Delete, Entry, KeyChange, Put, Store
from control_plane.store.bulk import put_all
from control_plane.store.copies import Numbers
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore
from tests.contract.conftest import REAL
from tests.etcd import etcd_cluster
from wire.errors import Busy, ConfigError, Conflict

T = TypeVar("T")


ENGINES = ["memory", "sqlite", *(["etcd", "etcd_moved"] if "etcd" in REAL else [])]
"""`etcd_moved` was migrated from another engine, whose revisions were far above those of etcd."""


@pytest.fixture(scope="session")
def members():
    with etcd_cluster() as cluster:
        yield cluster.urls


@pytest.fixture(params=ENGINES)
def another(request, tmp_path) -> Callable[[], Store]:
    """Return a factory of stores on the same data; only one of them may be open at a time."""
    if request.param == "memory":
        one = MemoryStore(history=50)
        return lambda: one
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path, 50)
    from control_plane.store.etcd import EtcdStore  # a bare guest has no gRPC

    urls = request.getfixturevalue("members")
    settings = EtcdSettings(endpoints=urls, prefix=f"/{tmp_path.name}", standby=False)
    if request.param == "etcd_moved":

        async def come() -> None:
            async with EtcdStore(settings, migrating=True) as store:
                await store.set_note(None, Numbers(7, 1 << 40))

        asyncio.run(come())
    return lambda: EtcdStore(settings, 50)


@pytest.fixture
def store(another) -> Store:
    return another()


def on(store: Store, body: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store, run the body, close the store; a second call is a restart."""

    async def opened() -> T:
        async with asyncio.timeout(20), store:
            return await body(store)

    return asyncio.run(opened())


def in_pieces(operations: list, size: int = 5) -> list[list]:
    """Return transactions that every engine accepts: etcd accepts at most 1.5 MiB in one."""
    return [operations[n : n + size] for n in range(0, len(operations), size)]


async def take(changes, count: int) -> list[KeyChange]:
    found = []
    async for change in changes:
        found.append(change)
        if len(found) == count:
            break
    return found


def test_a_written_record_is_read_with_its_revision(store):
    async def body(s: Store):
        revision = await s.txn({}, [Put("jobs/web", b"a"), Put("machines/m1", b"b")])
        assert await s.get("jobs/web") == Entry("jobs/web", b"a", revision)
        assert await s.get("jobs/none") is None
        assert await s.txn({}, [Put("jobs/web", b"c")]) == revision + 1
        assert (await s.get("machines/m1")).revision == revision

    on(store, body)


def test_a_stale_writer_loses_and_changes_nothing(store):
    async def body(s: Store):
        first = await s.txn({"jobs/web": 0}, [Put("jobs/web", b"a")])
        await s.txn({"jobs/web": first}, [Put("jobs/web", b"b")])
        with pytest.raises(Conflict, match="jobs/web"):
            await s.txn({"jobs/web": first}, [Put("jobs/web", b"c"), Put("jobs/x", b"c")])
        with pytest.raises(Conflict):
            await s.txn({"jobs/web": 0}, [Put("jobs/web", b"c")])
        assert (await s.get("jobs/web")).value == b"b"
        assert await s.get("jobs/x") is None

    on(store, body)


def test_a_comparison_may_name_a_key_that_is_not_written(store):
    async def body(s: Store):
        revision = await s.txn({}, [Put("machines/m1", b"")])
        await s.txn({"machines/m1": revision}, [Put("jobs/web", b"")])
        await s.txn({}, [Delete("machines/m1")])
        with pytest.raises(Conflict):
            await s.txn({"machines/m1": revision}, [Put("jobs/web", b"x")])
        await s.txn({"machines/m1": 0}, [Put("jobs/web", b"y")])

    on(store, body)


def test_a_transaction_touches_a_key_once(store):
    async def body(s: Store):
        with pytest.raises(ValueError, match="once"):
            await s.txn({}, [Put("a", b""), Delete("a")])
        await s.txn({}, [Put("a", b"")])

    on(store, body)


def test_a_list_is_ordered_and_keeps_to_its_prefix(store):
    async def body(s: Store):
        for key in ("jobs/b", "jobs/a", "jobs-not", "machines/a", "jobs/ü"):
            revision = await s.txn({}, [Put(key, key.encode())])
        listing = await s.list_prefix("jobs/")
        assert [e.key for e in listing.entries] == ["jobs/a", "jobs/b", "jobs/ü"]
        assert listing.revision == revision
        await s.txn({}, [Delete("jobs/a")])
        assert len((await s.list_prefix("jobs/")).entries) == 2
        assert (await s.list_prefix("none/")).entries == ()

    on(store, body)


def test_pages_in_order_hold_what_one_list_holds(store):
    async def body(s: Store):
        keys = sorted(f"jobs/{n}" for n in range(25))
        await s.txn({}, [Put(key, b"") for key in [*keys, "jobs", "jobt", "a/1"]])
        pages, after = [], ""
        while not pages or len(pages[-1]) == 10:
            listing = await s.list_prefix("jobs/", after=after, limit=10)
            pages.append([e.key for e in listing.entries])
            after = pages[-1][-1]
        assert [len(page) for page in pages] == [10, 10, 5]
        assert [key for page in pages for key in page] == keys
        assert (await s.list_prefix("jobs/", after="jobs/24", limit=1)).entries[0].key == "jobs/3"
        assert (await s.list_prefix("jobs/", after="jobs/9")).entries == ()
        assert (await s.list_prefix("jobs/", after="k")).entries == ()
        assert (await s.list_prefix("jobs/", limit=0)).entries == ()

    on(store, body)


def test_pages_then_a_watch_from_the_first_page_miss_nothing(store):
    """The procedure of the protocol, with writes between the pages."""

    async def body(s: Store):
        await s.txn({}, [Put(f"k/{n:02}", b"0") for n in range(20)])
        known: dict[str, tuple[int, bytes | None]] = {}
        after, begin, done = "", None, False
        while not done:
            page = await s.list_prefix("k/", after=after, limit=5)
            begin = page.revision if begin is None else begin
            known.update({e.key: (e.revision, e.value) for e in page.entries})
            done = len(page.entries) < 5
            after = page.entries[-1].key if page.entries else after
            last = await s.txn({}, [Put("k/00", after.encode()), Delete("k/19"), Put("k/7", b"")])
        async for change in s.watch("k/", begin):
            if change.revision >= known.get(change.key, (0, b""))[0]:
                known[change.key] = (change.revision, change.value)
            if change.revision == last and change.key == "k/7":
                break
        found = {key: value for key, value in known.items() if value[1] is not None}
        now = await s.list_prefix("k/")
        assert found == {e.key: (e.revision, e.value) for e in now.entries}

    on(store, body)


def test_list_then_watch_misses_nothing_and_repeats_nothing(store):
    async def body(s: Store):
        await s.txn({}, [Put("jobs/a", b"0")])
        listing = await s.list_prefix("jobs/")
        await s.txn({}, [Put("jobs/a", b"1"), Put("other", b"")])
        watch = s.watch("jobs/", listing.revision)
        first = await take(watch, 1)
        async with asyncio.TaskGroup() as group:
            rest = group.create_task(take(watch, 2))
            await asyncio.sleep(0)
            await s.txn({}, [Delete("jobs/a"), Put("jobs/b", b"2")])
        seen = [(c.key, c.value, c.revision - listing.revision) for c in first + rest.result()]
        assert seen == [("jobs/a", b"1", 1), ("jobs/a", None, 2), ("jobs/b", b"2", 2)]

    on(store, body)


def test_a_watch_of_compacted_history_must_list_again(store):
    async def body(s: Store):
        await s.txn({}, [Put("a", b"0")])
        old = (await s.list_prefix("")).revision
        for i in range(5):
            revision = await s.txn({}, [Put("a", str(i).encode())])
        await s.compact(revision)
        with pytest.raises(Compacted):
            await anext(s.watch("", old))
        await s.txn({}, [Put("a", b"new")])
        assert (await anext(s.watch("", revision))).value == b"new"
        assert (await s.get("a")).value == b"new"

    on(store, body)


def test_history_drops_its_oldest_entries(store):
    async def body(s: Store):
        start = (await s.list_prefix("")).revision
        for i in range(60):
            last = await s.txn({}, [Put("a", str(i).encode())])
        await take(s.watch("", last - 1), 1)  # the history has reached this revision
        with pytest.raises(Compacted):
            await anext(s.watch("", start))

    on(store, body)


def test_a_waiting_watcher_learns_of_a_compaction(store):
    async def body(s: Store):
        watch = s.watch("a", (await s.list_prefix("")).revision)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(take(watch, 1))
            await asyncio.sleep(0)
            await s.txn({}, [Put("b", b"")])
            await s.txn({}, [Put("a", b"x")])
        assert waiting.result()[0].value == b"x"

    on(store, body)


def test_a_restart_keeps_everything_and_raises_the_epoch(store):
    async def first(s: Store):
        await s.txn({}, [Put("a", b"1")])
        return s.epoch(), await s.txn({}, [Put("b", b"2")])

    async def second(s: Store):
        assert (await s.get("a")).value == b"1"
        listing = await s.list_prefix("")
        assert await s.txn({}, [Put("c", b"3")]) == listing.revision + 1
        return s.epoch(), listing.revision

    epoch, revision = on(store, first)
    again, newest = on(store, second)
    assert again == epoch + 1
    assert newest >= revision  # etcd also counts the change of leader


def test_a_second_owner_is_refused_with_exit_code_75(store, another):
    async def body(s: Store):
        other, term = another(), s.epoch()
        with pytest.raises(Busy, match="another") as refused:
            await other.__aenter__()
        assert refused.value.exit_code == 75
        assert s.epoch() == term  # the refused candidate did not start a term

    on(store, body)


def test_many_writers_at_once_all_count(store):
    async def body(s: Store):
        async def increment() -> None:
            while True:
                entry = await s.get("n")
                value = int(entry.value) + 1 if entry else 1
                try:
                    at = entry.revision if entry else 0
                    await s.txn({"n": at}, [Put("n", str(value).encode())])
                    return
                except Conflict:
                    await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(increment())
        assert (await s.get("n")).value == b"30"

    on(store, body)


def test_a_damaged_database_is_reported_clearly(tmp_path):
    (tmp_path / "twine.db").write_bytes(b"not a database" * 100)

    async def body(s: Store):
        raise AssertionError("opened")

    with pytest.raises(ConfigError, match="not a database"):
        on(SqliteStore(tmp_path), body)


def test_a_newer_schema_is_refused(tmp_path):
    async def nothing(s: Store):
        return None

    on(SqliteStore(tmp_path), nothing)
    with sqlite3.connect(tmp_path / "twine.db") as db:
        db.execute("UPDATE meta SET value = 99 WHERE name = 'schema'")
    db.close()
    with pytest.raises(ConfigError, match="newer"):
        on(SqliteStore(tmp_path), nothing)


def test_a_key_is_printable_text(store):
    async def body(s: Store):
        for key in ("a\0b", "a\ud800", "a\n"):
            with pytest.raises(ValueError, match="printable"):
                await s.txn({}, [Put(key, b"")])
            with pytest.raises(ValueError, match="printable"):
                await s.txn({key: 0}, [])

    on(store, body)


def test_any_bytes_come_back_as_they_were_also_very_many(store):
    chance = random.Random(3)
    wanted = {f"k/{n:03}": chance.randbytes(n * 900) for n in range(200)} | {
        f"l/{n}": bytes([n]) * (n % 3) for n in range(256)
    }

    async def body(s: Store):
        for puts in in_pieces([Put(key, value) for key, value in wanted.items()]):
            await s.txn({}, puts)
        listing = await s.list_prefix("")
        assert {e.key: e.value for e in listing.entries} == wanted
        assert (await s.get("k/199")).value == wanted["k/199"]
        assert (await s.get("l/0")).value == b""

    on(store, body)


@pytest.mark.parametrize("another", ["memory", "sqlite"], indirect=True)
def test_transactions_that_share_a_sync_come_one_after_the_other(store):
    """Transactions keep the order of the calls; etcd, over the network, has its own order."""

    async def body(s: Store):
        first = await s.txn({}, [Put("a", b"0")])
        outcomes = await asyncio.gather(
            s.txn({"a": first}, [Put("a", b"1"), Put("b", b"1")]),
            s.txn({"a": first}, [Put("a", b"lost")]),
            s.txn({"a": first + 1}, [Delete("a"), Put("c", b"2")]),
            s.txn({"a": 0, "b": first + 1}, [Put("a", b"3"), Delete("b")]),
            s.txn({"b": 0}, []),
            return_exceptions=True,
        )
        assert isinstance(outcomes.pop(1), Conflict)
        assert outcomes == [first + 1, first + 2, first + 3, first + 3]
        found = {e.key: (e.value, e.revision) for e in (await s.list_prefix("")).entries}
        assert found == {"a": (b"3", first + 3), "c": (b"2", first + 2)}
        changes = [(c.key, c.value) for c in await take(s.watch("", first), 6)]
        assert changes == [
            *[("a", b"1"), ("b", b"1"), ("a", None), ("c", b"2"), ("a", b"3"), ("b", None)]
        ]

    on(store, body)


def test_very_many_keys_are_written_in_bulk(store):
    async def body(s: Store):
        assert await put_all(s, ((f"k/{n:05}", b"%d" % n) for n in range(3500))) == 3500
        listing = await s.list_prefix("k/")
        assert [e.value for e in listing.entries] == [b"%d" % n for n in range(3500)]

    on(store, body)


def test_a_loop_that_computes_does_not_starve_the_writer(tmp_path):
    """The loop has 2 ms of work per iteration.

    At Python's own switch interval the writer writes nothing.
    """

    async def body(s: Store):
        async def compute() -> None:
            while True:
                until = time.perf_counter() + 0.002
                while time.perf_counter() < until:
                    pass
                await asyncio.sleep(0)

        computing = asyncio.ensure_future(compute())
        async with asyncio.timeout(10):
            for n in range(20):
                await s.txn({}, [Put("a", b"%d" % n)])
        computing.cancel()

    on(SqliteStore(tmp_path), body)


def test_a_store_of_the_first_release_is_brought_up(tmp_path):
    with sqlite3.connect(tmp_path / "twine.db") as db:
        db.executescript("""
            CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
            CREATE TABLE state (
              key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
            CREATE TABLE log (revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
              PRIMARY KEY (revision, key)) WITHOUT ROWID;
            INSERT INTO meta VALUES ('schema', 1), ('epoch', 7), ('revision', 9), ('compacted', 6);
            INSERT INTO state VALUES ('a', x'00ff', 8), ('b', x'', 9);
            INSERT INTO log VALUES (7, 'c', x'01'), (8, 'a', x'00ff'), (9, 'b', x''),
              (9, 'c', NULL);
        """)
    db.close()

    async def body(s: Store):
        listing = await s.list_prefix("")
        assert listing.entries == (Entry("a", b"\x00\xff", 8), Entry("b", b"", 9))
        changes = [(c.revision, c.key, c.value) for c in await take(s.watch("", 6), 4)]
        assert changes == [(7, "c", b"\1"), (8, "a", b"\0\xff"), (9, "b", b""), (9, "c", None)]
        with pytest.raises(Compacted):
            await anext(s.watch("", 5))
        return s.epoch(), await s.txn({"a": 8}, [Put("a", b"")])

    assert on(SqliteStore(tmp_path), body) == (8, 10)
    assert on(SqliteStore(tmp_path), lambda s: s.get("a")) == Entry("a", b"", 10)


@pytest.mark.behaviour("BUG-CP150")
def test_a_write_that_arrives_while_the_store_closes_is_refused(tmp_path):
    """Formerly its caller waited forever, because the writing thread had ended."""

    async def closing() -> None:
        store = SqliteStore(tmp_path)
        await store.__aenter__()
        early = asyncio.ensure_future(store.txn({}, [Put("early", b"")]))
        await asyncio.sleep(0)
        close = asyncio.ensure_future(store.__aexit__(None, None, None))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            with pytest.raises(Busy, match="it is not open"):
                await store.txn({}, [Put("late", b"")])
            assert await early == 1
            await close

    asyncio.run(closing())
