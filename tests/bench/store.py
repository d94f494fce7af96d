"""How many durable transactions a second do SQLite and etcd commit, and how long does each take?

    python -m tests.bench.store [--seconds 3] [--records 20000] [--load 1000000] [--json]

Writes records of 1-3 KB as an allocator does: one or two keys per transaction, each with its base
revision, N in flight. The stores are SQLite, one etcd member (`etcd_1`) and a cluster of three
(`etcd_3`). All members run on this host and share its disk and its CPUs, so the three-member
figures include no network and do not represent three hosts.

The floor is measured in the same run: the same rows in groups of the same size, written to SQLite
by one thread without a queue, comparisons, a log or an event loop. `ratio` is a store's rate over
this floor. The page shows two keys on an idle loop; `details` has every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from control_plane.config import EtcdSettings
from control_plane.store import Put, Store
from control_plane.store.bulk import put_all
from control_plane.store.etcd import EtcdStore
from control_plane.store.sqlite import SqliteStore
from tests.etcd import etcd_cluster

Row = dict[str, str | int | float]
KINDS = ("sqlite", "etcd_1", "etcd_3")
SHAPES = list(product((1, 64, 256), (1, 2), ("idle", "busy")))
BULK_VALUE = b"m" * 400


def values(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.randrange(1000, 3000)) for _ in range(64)]


async def compute(end: float) -> None:
    """Keep the event loop busy, as an allocator that plans does: 2 ms, a turn, 2 ms …"""
    while time.perf_counter() < end:
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            sum(range(500))
        await asyncio.sleep(0)


async def transactions(
    opened: Store, in_flight: int, keys: int, records: int, seconds: float, busy: bool
) -> tuple[float, list[float]]:
    """Return (transactions a second, milliseconds of each)."""
    took: list[float] = []
    blobs = values(1)
    async with opened as store:
        end = time.perf_counter() + seconds

        async def lane(number: int) -> None:
            known: dict[str, int] = {}
            turn = 0
            while time.perf_counter() < end:
                names = [
                    f"allocations/job-{(turn * keys + k) % (records // in_flight)}-of-{number}"
                    for k in range(keys)
                ]
                turn += 1
                began = time.perf_counter()
                puts = [Put(name, blobs[(turn + k) % 64]) for k, name in enumerate(names)]
                revision = await store.txn({n: known.get(n, 0) for n in names}, puts)
                took.append((time.perf_counter() - began) * 1000)
                known.update(dict.fromkeys(names, revision))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(in_flight):
                group.create_task(lane(number))
            if busy:
                group.create_task(compute(end))
        return len(took) / (time.perf_counter() - began), took


def floor(folder: Path, in_flight: int, keys: int, records: int, seconds: float) -> float:
    """Return rows a second of plain SQLite, divided by the keys of a transaction."""
    folder.mkdir()
    db = sqlite3.connect(folder / "floor.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE t (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")
    blobs, done, began = values(1), 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        rows = [
            (f"allocations/job-{(done + k) % records:06}", blobs[k % 64])
            for k in range(in_flight * keys)
        ]
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT OR REPLACE INTO t VALUES (?, ?)", rows)
        db.execute("COMMIT")
        done += len(rows)
    took = time.perf_counter() - began
    db.close()
    return done / keys / took


async def bulk(folder: Path, keys: int) -> float:
    """Return seconds to write `keys` machine records, in transactions of 1,000."""
    async with SqliteStore(folder) as store:
        began = time.perf_counter()
        await put_all(store, ((f"machines/m{n:07}", BULK_VALUE) for n in range(keys)))
        return time.perf_counter() - began


@contextmanager
def stores(kind: str, folder: Path) -> Iterator[Callable[[str], Store]]:
    """Yield a function that opens a new empty store of a kind."""
    if kind == "sqlite":
        yield lambda name: SqliteStore(folder / name)
        return
    with etcd_cluster(int(kind.removeprefix("etcd_")), folder) as cluster:
        yield lambda name: EtcdStore(
            EtcdSettings(endpoints=cluster.urls, prefix=f"/{name}", ttl_s=60)
        )


def measure(kind: str, folder: Path, records: int, seconds: float) -> list[Row]:
    """Return a row for each shape of load on one kind of store."""
    rows = []
    with stores(kind, folder) as open_store:
        for number, (in_flight, keys, loop) in enumerate(SHAPES):
            shape = (in_flight, keys, records, seconds)
            store = open_store(f"store-{number}")
            rate, took = asyncio.run(transactions(store, *shape, loop == "busy"))
            lowest = floor(folder / f"floor-{number}", *shape)
            took.sort()
            row: Row = {
                "store": kind,
                "in_flight": in_flight,
                "keys": keys,
                "loop": loop,
                "txns_per_s": round(rate),
                "p50_ms": round(statistics.median(took), 2),
                "p99_ms": round(took[int(len(took) * 0.99)], 2),
                "max_ms": round(took[-1], 1),
                "floor_per_s": round(lowest),
                "ratio": round(rate / lowest, 2),
            }
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def page(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Return the figures of the page, by store and transactions in flight."""
    shown: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (row["keys"], row["loop"]) == (2, "idle"):
            figures = {k: row[k] for k in ("txns_per_s", "p50_ms", "p99_ms", "ratio")}
            shown.setdefault(str(row["store"]), {})[f"in_flight_{row['in_flight']}"] = figures
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--records", type=int, default=20_000, help="different keys")
    parser.add_argument("--load", type=int, default=0, help="keys of the bulk load, into SQLite")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            rows += measure(kind, Path(name), options.records, options.seconds)
    result: dict[str, object] = {**page(rows), "details": rows}
    if options.load:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            result["bulk_s"] = round(asyncio.run(bulk(Path(name), options.load)), 1)
    if options.json:
        print(json.dumps(result))
        return
    print(f"| {' | '.join(rows[0])} |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if options.load:
        print(f"bulk load of {options.load} keys: {result['bulk_s']} s")


if __name__ == "__main__":
    main()
