"""How many durable transactions a second does the store take, and how long does each wait?

    python tests/bench/store.py [--seconds 3] [--records 20000] [--load 1000000] [--json]

Writes records of 1-3 KB as an allocator does: one or two keys per transaction, each with
the revision that it is based on, N in flight. Beside it, in the same run, stands a floor:
the same rows in groups of the same size, written to SQLite by one thread with no queue, no
comparisons, no log and no event loop.
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
from itertools import product
from pathlib import Path

from control_plane.store import Put
from control_plane.store.bulk import put_all
from control_plane.store.sqlite import SqliteStore

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
    folder: Path, in_flight: int, keys: int, records: int, seconds: float, busy: bool
) -> tuple[float, list[float]]:
    """Return (transactions a second, milliseconds of each)."""
    took: list[float] = []
    blobs = values(1)
    async with SqliteStore(folder) as store:
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
    """Return seconds to write so many machine records, in transactions of 1,000."""
    async with SqliteStore(folder) as store:
        began = time.perf_counter()
        await put_all(store, ((f"machines/m{n:07}", BULK_VALUE) for n in range(keys)))
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--records", type=int, default=20_000, help="different keys")
    parser.add_argument("--load", type=int, default=0, help="keys of the bulk load")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for in_flight, keys, busy in product((1, 64, 256), (1, 2), (False, True)):
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            shape = (in_flight, keys, options.records, options.seconds)
            rate, took = asyncio.run(transactions(Path(name) / "store", *shape, busy))
            lowest = floor(Path(name) / "floor", *shape)
        took.sort()
        row = {
            "in_flight": in_flight,
            "keys": keys,
            "loop": "busy" if busy else "idle",
            "txns_per_s": round(rate),
            "p50_ms": round(statistics.median(took), 2),
            "p99_ms": round(took[int(len(took) * 0.99)], 2),
            "max_ms": round(took[-1], 1),
            "floor_per_s": round(lowest),
            "ratio": round(rate / lowest, 2),
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    result: dict[str, object] = {"transactions": rows}
    if options.load:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            result["bulk_s"] = round(asyncio.run(bulk(Path(name), options.load)), 1)
    if options.json:
        print(json.dumps(result))
        return
    print("| in flight | keys | loop | txns/s | p50 ms | p99 ms | max ms | floor/s | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if options.load:
        print(f"bulk load of {options.load} keys: {result['bulk_s']} s")


if __name__ == "__main__":
    main()
