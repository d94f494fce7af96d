"""Invariant 5: killing the process at any moment loses no acknowledged write."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from control_plane.store import Entry, KeyChange
from control_plane.store.sqlite import SqliteStore
from control_plane.store.statements import read_log

LANES = 64
ROUNDS = 6
KEPT = 5
"""Number of older keys that a lane leaves; each transaction deletes one."""

_WRITER = f"""
import asyncio, sys
from pathlib import Path
from control_plane.store import Delete, Put
from control_plane.store.sqlite import SqliteStore

async def main():
    async with SqliteStore(Path(sys.argv[1]), 2000) as store:
        life = store.epoch()
        async def write(lane):
            at = {{e.key: e.revision for e in (await store.list_prefix(f"now/{{lane}}/")).entries}}
            for n in range(100_000):
                value = f"{{life}} {{n}}".encode().ljust(1000)
                parts = [f"now/{{lane}}/{{part}}" for part in range(3)]
                operations = [Put(key, value) for key in [*parts, f"done/{{life}}/{{lane}}/{{n}}"]]
                if n >= {KEPT}:
                    operations.append(Delete(f"done/{{life}}/{{lane}}/{{n - {KEPT}}}"))
                revision = await store.txn({{key: at.get(key, 0) for key in parts}}, operations)
                at = dict.fromkeys(parts, revision)
                sys.stdout.write(f"{{lane}} {{n}} {{revision}}\\n"); sys.stdout.flush()
        async with asyncio.TaskGroup() as group:
            for lane in range({LANES}):
                group.create_task(write(lane))
asyncio.run(main())
"""


def test_no_acknowledged_write_is_lost_by_a_kill(tmp_path):
    """SIGKILL hits group commits of 64 writers, repeatedly, on one store."""
    chance = random.Random(20)
    newest = 0
    for life in range(1, ROUNDS + 1):
        lines = _killed_writer(tmp_path, chance.randrange(LANES, 4000))
        acknowledged = [tuple(map(int, line.split())) for line in lines if line.endswith(b"\n")]
        revisions = [revision for _, _, revision in acknowledged]
        assert len(set(revisions)) == len(revisions)
        assert min(revisions) > newest, "a revision of an earlier life was given out again"
        newest, state, log = _on_disk(tmp_path)
        assert newest >= max(revisions)
        _log_leads_to(state, log, newest)
        last = {lane: (n, revision) for lane, n, revision in acknowledged}
        for lane in range(LANES):
            _is_whole(state, lane, life, *last.get(lane, (-1, 0)))

    async def reopened() -> tuple[int, int, dict[str, Entry]]:
        async with SqliteStore(tmp_path) as store:
            listing = await store.list_prefix("")
            return store.epoch(), listing.revision, {e.key: e for e in listing.entries}

    assert asyncio.run(reopened()) == (ROUNDS + 1, newest, state)


def _killed_writer(folder: Path, after: int) -> list[bytes]:
    """Kill the writer after this number of acknowledged transactions; return its output."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout
    lines = [writer.stdout.readline() for _ in range(after)]
    os.kill(writer.pid, signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.wait()
    writer.stdout.close()
    return lines


def _on_disk(folder: Path) -> tuple[int, dict[str, Entry], list[KeyChange]]:
    """Return (newest revision, state, log) as on the disk, without opening the store."""
    db = sqlite3.connect(folder / "twine.db")
    rows = db.execute("SELECT key, value, revision FROM state")
    state = {row[0]: Entry(*row) for row in rows}
    log = list(read_log(db, 0))
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()
    return log[-1].revision, state, log


def _log_leads_to(state: dict[str, Entry], log: list[KeyChange], newest: int) -> None:
    """Check that revisions have no gap and that the last change of each key matches the state."""
    revisions = sorted({change.revision for change in log})
    assert revisions == list(range(revisions[0], newest + 1))
    last = {change.key: change for change in log}
    for key, change in last.items():
        entry = state.get(key)
        found = (entry.value, entry.revision) if entry else (None, change.revision)
        assert found == (change.value, change.revision)
    assert {e.key for e in state.values() if e.revision >= revisions[0]} <= set(last)


def _is_whole(state: dict[str, Entry], lane: int, life: int, n: int, revision: int) -> None:
    """Check that a lane ends with its last acknowledged transaction or the next, complete."""
    done = {int(k.split("/")[3]) for k in state if k.startswith(f"done/{life}/{lane}/")}
    found = max(done, default=-1)
    assert found in (n, n + 1)
    if found < 0:
        return  # this run wrote nothing in this lane
    assert done == set(range(max(0, found - KEPT + 1), found + 1))
    parts = [state[f"now/{lane}/{part}"] for part in range(3)]
    whole = [*parts, state[f"done/{life}/{lane}/{found}"]]
    assert {part.value.decode().strip() for part in whole} == {f"{life} {found}"}
    assert len({part.revision for part in whole}) == 1
    assert found > n or parts[0].revision == revision
