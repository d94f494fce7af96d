"""Failures of a store's disk, writer or process: the store reports which outcomes are unknown."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from control_plane.store import Put, writer
from control_plane.store.outcomes import Slots, WriteAttempt
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy, UnknownOutcome

ROOT = Path(__file__).parents[2]


def broken_connection(store: SqliteStore, fail: object) -> None:
    """Pass the writer's next statements through `fail(sql)`, which may raise."""
    inner = store._writer._connection

    class Connection:
        def execute(self, sql: str, *values: object) -> object:
            fail(sql)
            return inner.execute(sql, *values)

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

    store._writer._connection = Connection()


class Once:
    """Raises an error at the next statement that begins with a given word."""

    def __init__(self, word: str, error: BaseException) -> None:
        self.word, self.error, self.done = word, error, False

    def __call__(self, sql: str) -> None:
        if sql.startswith(self.word) and not self.done:
            self.done = True
            raise self.error


def disk_error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.behaviour("BUG-CP13")
async def test_a_dead_writer_fails_every_write_with_its_reason(tmp_path: Path) -> None:
    """A dead writer blocked all writers forever without an error."""
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        await store.txn({}, [Put("a", b"1")])
        assert store.failure() == ""
        failed = asyncio.ensure_future(store.wait_failed())
        broken_connection(store, Once("COMMIT", SystemExit("the thread is ended")))
        writes = [asyncio.ensure_future(store.txn({}, [Put(f"k{n}", b"")])) for n in range(3)]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnknownOutcome] * 3
        with pytest.raises(Busy, match="its writer has ended: SystemExit"):
            await store.txn({}, [Put("b", b"")])
        with pytest.raises(Busy, match="its writer has ended"):
            await failed
        assert "its writer has ended" in store.failure()
        assert (await store.get("a")).value == b"1"  # reads continue until the process has ended
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        assert (await store.get("a")).value == b"1"
        assert store.failure() == ""


@pytest.mark.behaviour("BUG-CP13")
async def test_a_write_that_waits_behind_a_failed_one_is_known_not_to_be_made(
    tmp_path: Path,
) -> None:
    """Only the outcome of writes that the thread had begun is unknown."""
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        broken_connection(store, Once("COMMIT", SystemExit()))
        first = asyncio.ensure_future(store.txn({}, [Put("a", b"")]))
        await asyncio.sleep(0)
        store._writer._send()
        while not store._writer._group and not store.failure():
            await asyncio.sleep(0)
        second = asyncio.ensure_future(store.txn({}, [Put("b", b"")]))
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnknownOutcome, Busy]


@pytest.mark.behaviour("F-47")
async def test_a_disk_that_fails_while_it_syncs_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    """The log may hold the write after a crash; querying the outcome resolves this."""
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        slots = Slots(store, "test")
        broken_connection(
            store, Once("COMMIT", disk_error(sqlite3.SQLITE_IOERR_FSYNC, "disk I/O error"))
        )
        attempt = WriteAttempt(slots, {"a": 0}, [Put("a", b"1")])
        with pytest.raises(UnknownOutcome, match="its disk failed: disk I/O error"):
            await attempt.make()
        assert await attempt.outcome() == 0
        assert await store.get("a") is None
        assert await WriteAttempt(slots, {"a": 0}, [Put("a", b"2")]).make() > 0
        assert store.failure() == ""


@pytest.mark.behaviour("F-46")
async def test_a_full_disk_refuses_writes_and_takes_them_again(tmp_path: Path) -> None:
    """The writer survives, reads continue, and the store reports that nothing was changed."""
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        await store.txn({}, [Put("a", b"1")])
        full = disk_error(sqlite3.SQLITE_FULL, "database or disk is full")
        for word in ("COMMIT", "BEGIN"):
            broken_connection(store, Once(word, full))
            with pytest.raises(Busy, match="disk is full") as refused:
                await store.txn({}, [Put("a", b"2")])
            assert (refused.value.status, refused.value.retryable) == (503, True)
            assert (await store.get("a")).value == b"1"
        assert await store.txn({}, [Put("a", b"3")]) == 2
        assert store.failure() == ""


@pytest.mark.behaviour("F-46")
async def test_the_wait_for_a_hanging_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow write is not lost.

    A caller that waits too long gets an error, later callers at once.
    """
    usual = writer.SLOW_S
    monkeypatch.setattr(writer, "SLOW_S", 0.2)
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / "twine.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(UnknownOutcome, match="did not answer within"):
                await store.txn({}, [Put("a", b"1")])
            with pytest.raises(Busy, match="has not answered for"):
                await store.txn({}, [Put("b", b"1")])
            assert await store.get("a") is None
            other.execute("COMMIT")
        monkeypatch.setattr(writer, "SLOW_S", usual)
        while await store.get("a") is None:  # the write was late, but it was made
            await asyncio.sleep(0.01)
        revision = 0
        while not revision:  # the file has the write before the writer reports it
            with suppress(Busy):
                revision = await store.txn({}, [Put("b", b"1")])
            await asyncio.sleep(0.01)
        assert revision == 2


@pytest.mark.behaviour("F-43")
async def test_a_long_pause_of_a_writer_is_no_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGCONT the loop runs its timers before it receives the thread's answer."""
    monkeypatch.setattr(writer, "SLOW_S", 0.2)
    async with asyncio.timeout(20), SqliteStore(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / "twine.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            write = asyncio.ensure_future(store.txn({}, [Put("a", b"1")]))
            await asyncio.sleep(0.01)
            pause = asyncio.get_running_loop().time() + 0.5
            while asyncio.get_running_loop().time() < pause:
                pass
            other.execute("COMMIT")
        assert await write == 1


_OWNER = """
import asyncio, sys
from pathlib import Path
from control_plane.store import Put
from control_plane.store.sqlite import SqliteStore

async def main():
    async with SqliteStore(Path(sys.argv[1])) as store:
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                print(await store.txn({}, [Put("a", line.strip().encode())]), flush=True)
            except Exception as e:
                print(type(e).__name__, e, "|", store.failure(), flush=True)
asyncio.run(main())
"""


def send_line(owner: subprocess.Popen[str], line: str) -> None:
    assert owner.stdin
    owner.stdin.write(line + "\n")
    owner.stdin.flush()


@pytest.mark.behaviour("F-43")
def test_a_paused_owner_keeps_the_store_and_a_former_owner_writes_nothing(tmp_path: Path) -> None:
    """A paused owner still holds the lock.

    If a user removes the lock, the store refuses the owner's late writes, because it was opened
    since.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "open\n"
        send_line(owner, "first")
        assert owner.stdout.readline() == "1\n"
        os.kill(owner.pid, signal.SIGSTOP)
        send_line(owner, "late")

        async def other(value: bytes) -> int:
            async with SqliteStore(tmp_path) as store:
                return await store.txn({}, [Put("b", value)])

        with pytest.raises(Busy, match="another control plane uses it"):
            asyncio.run(other(b"no"))
        (tmp_path / "lock").unlink()
        assert asyncio.run(other(b"yes")) == 2
        os.kill(owner.pid, signal.SIGCONT)
        reported = owner.stdout.readline()
        assert reported.startswith("Superseded cannot write to the store: another control plane")
        send_line(owner, "later")
        assert owner.stdout.readline().startswith("Superseded")
        owner.stdin.close()
        assert owner.wait(20) == 0

    async def found() -> dict[str, bytes]:
        async with SqliteStore(tmp_path) as store:
            return {entry.key: entry.value for entry in (await store.list_prefix("")).entries}

    assert asyncio.run(found()) == {"a": b"first", "b": b"yes"}


@pytest.mark.behaviour("F-45")
def test_one_of_two_hundred_concurrent_candidates_owns_the_store(tmp_path: Path) -> None:
    """All candidates try at the same time whenever the owner has ended.

    The others get an error at once and write nothing. Each owner has an epoch above all earlier
    ones.
    """
    count, rounds = 200, 3
    wake, ended = threading.Barrier(count), threading.Barrier(count)
    owned, refused = list[tuple[int, int]](), list[str]()

    async def campaign(number: int) -> None:
        try:
            async with SqliteStore(tmp_path) as store:
                await store.txn({}, [Put(f"owner-{store.epoch()}", b"%d" % number)])
                owned.append((store.epoch(), number))
                await asyncio.to_thread(ended.wait)  # all others have received their answer
        except Busy as e:
            refused.append(str(e))
            ended.wait()

    def follower(number: int) -> None:
        for _ in range(rounds):
            wake.wait()
            asyncio.run(campaign(number))

    threads = [threading.Thread(target=follower, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [epoch for epoch, _ in owned] == list(range(1, rounds + 1))
    assert len(refused) == rounds * (count - 1)
    assert {words.partition(": ")[2] for words in refused} == {"another control plane uses it"}

    async def found() -> list[tuple[int, int]]:
        async with SqliteStore(tmp_path) as store:
            entries = (await store.list_prefix("owner-")).entries
            return [(int(e.key.removeprefix("owner-")), int(e.value)) for e in entries]

    assert asyncio.run(found()) == owned


def of_the_first_release(path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript("""
            CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
            CREATE TABLE state (
              key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
            CREATE TABLE log (revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
              PRIMARY KEY (revision, key)) WITHOUT ROWID;
            INSERT INTO meta VALUES ('schema', 1), ('epoch', 7), ('revision', 300),
              ('compacted', 0);
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)
              INSERT INTO state SELECT 'k/' || i, x'00ff', i FROM n;
            INSERT INTO log SELECT revision, key, value FROM state;
        """)


async def reads(folder: Path) -> tuple[int, list[tuple[str, int]], int]:
    async with SqliteStore(folder) as store:
        listing = await store.list_prefix("")
        return store.epoch(), [(e.key, e.revision) for e in listing.entries], listing.revision


@pytest.mark.behaviour("F-61")
async def test_an_interrupted_migration_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration is stopped after each step. The next start finds all data, and a copy is kept."""
    folder, connect, interrupted = tmp_path / "store", sqlite3.connect, 0
    folder.mkdir()
    of_the_first_release(folder / "twine.db")
    before = (folder / "twine.db").read_bytes()
    wanted = (8, sorted((f"k/{n}", n) for n in range(1, 301)), 300)
    for steps in range(0, 40_000, 1_700):
        for left in folder.iterdir():
            left.unlink()
        (folder / "twine.db").write_bytes(before)
        budget = [steps]

        def dying(*given: object, budget: list[int] = budget, **more: object) -> sqlite3.Connection:
            connection = connect(*given, **more)

            def stop() -> int:
                budget[0] -= 100
                return budget[0] < 0

            connection.set_progress_handler(stop, 100)
            return connection

        monkeypatch.setattr(sqlite3, "connect", dying)
        try:
            await reads(folder)
        except Exception:
            interrupted += 1
        monkeypatch.setattr(sqlite3, "connect", connect)
        epoch, entries, revision = await reads(folder)
        assert (entries, revision) == wanted[1:]
        assert epoch in (8, 9)
        with closing(connect(folder / "twine.db.before-upgrade")) as kept:
            schema = kept.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
            assert schema == (1,)
            assert kept.execute("SELECT count(*) FROM state").fetchone() == (300,)
    assert interrupted > 5
