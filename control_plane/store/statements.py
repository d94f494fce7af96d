"""The SQL of the durable store: each statement reads or writes many rows in one step.

Python releases its GIL at every step and at the end of a statement, and may wait
a whole switch interval (5 ms) to get it back while the event loop computes. One row per step
reduced 9,000 transactions a second to 96 as soon as the loop was busy. So any number of rows is
passed in two values: a JSON list with the position of each, and all their bytes in one piece.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from control_plane.store.protocol import OPERATIONS_MAX, Entry, KeyChange
from wire.errors import ConfigError

SCHEMA = 2
_SHIFT = (OPERATIONS_MAX - 1).bit_length()
"""A row of the log has the number `revision << _SHIFT | position within the transaction`."""
_PAGE = 2000
"""Rows that one step reads."""
_PIECE = 8 << 20
"""Approximate number of bytes that one step writes."""
_NOT_EMPTY = b"\0"
"""Precedes the joined values: `substr` of an empty blob would be NULL."""

_META = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
_TABLES = """
CREATE TABLE IF NOT EXISTS state (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS log (id INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB);
"""
_FROM_1 = f"""
BEGIN IMMEDIATE;
ALTER TABLE state RENAME TO state_1;
ALTER TABLE log RENAME TO log_1;
{_TABLES}
INSERT INTO state SELECT key, value, revision FROM state_1 ORDER BY key;
INSERT INTO log SELECT (revision << {_SHIFT}) + row_number() OVER (PARTITION BY revision) - 1,
  key, value FROM log_1 ORDER BY revision;
DROP TABLE state_1;
DROP TABLE log_1;
UPDATE meta SET value = 2 WHERE name = 'schema';
COMMIT;
"""
_REVISION = f"""
SELECT max(coalesce((SELECT max(id) FROM log) >> {_SHIFT}, 0), coalesce(max(value), 0))
FROM meta WHERE name IN ('revision', 'compacted')
"""
_GET = "SELECT value, revision FROM state WHERE key = ?"
_LIST = """
SELECT json_group_array(json_array(key, length(value), revision)),
  CAST(group_concat(value, '') AS BLOB)
FROM (SELECT key, value, revision FROM state WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)
"""
_FIND_REVISIONS = """
SELECT json_group_object(key, revision), (SELECT value FROM meta WHERE name = 'epoch') FROM state
WHERE key IN (SELECT value FROM json_each(?))
"""
_PUT = """
INSERT INTO state
SELECT j.value->>0, substr(?1, j.value->>1, j.value->>2), j.value->>3 FROM json_each(?2) AS j
WHERE true
ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision
"""
_DELETE = "DELETE FROM state WHERE key IN (SELECT value FROM json_each(?))"
_APPEND_LOG = """
INSERT INTO log
SELECT j.value->>4, j.value->>0,
  CASE WHEN j.value->>2 IS NULL THEN NULL ELSE substr(?1, j.value->>1, j.value->>2) END
FROM json_each(?2) AS j
"""

_REVISIONS = msgspec.json.Decoder(dict[str, int])
_PLACES = msgspec.json.Decoder(list[tuple[str, int, int]])
_encode = msgspec.json.Encoder().encode


def _json_text(value: object) -> str:
    return _encode(value).decode()


# ── opening


def needs_upgrade(db: sqlite3.Connection) -> bool:
    """Return whether an earlier release made the tables, so that they need an upgrade."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return False
    found = db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    return bool(found) and int(found[0]) < SCHEMA


def epoch(db: sqlite3.Connection) -> int:
    """Return the store's epoch: how often it has been opened."""
    return int(db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()[0])


def read_meta(db: sqlite3.Connection) -> dict[str, int]:
    """Return the metadata (schema, epoch, …), after creating or upgrading the tables."""
    db.execute(_META)
    meta: dict[str, int] = dict(db.execute("SELECT name, value FROM meta"))
    found = meta.get("schema", SCHEMA)
    if found > SCHEMA:
        raise ConfigError(
            f"cannot open the store: its schema {found} is newer than {SCHEMA}",
            hint="run the release that wrote it",
        )
    db.executescript(_TABLES if found == SCHEMA else _FROM_1)
    return meta


def write_meta(db: sqlite3.Connection, **values: int) -> None:
    """Set these items of the metadata."""
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))


def revision(db: sqlite3.Connection) -> int:
    """Return the newest revision, from the log or, if that was trimmed, the meta table."""
    return int(db.execute(_REVISION).fetchone()[0])


def read_log(db: sqlite3.Connection, after: int) -> Iterator[KeyChange]:
    """Yield the changes after a revision, in order."""
    for row, key, value in db.execute(
        "SELECT id, key, value FROM log WHERE id >= ? ORDER BY id", ((after + 1) << _SHIFT,)
    ):
        yield KeyChange(key, value, row >> _SHIFT)


# ── reading


def find(db: sqlite3.Connection, key: str) -> Entry | None:
    """Return the entry of a key."""
    row = db.execute(_GET, (key,)).fetchone()
    return Entry(key, *row) if row else None


def read_range(
    db: sqlite3.Connection, begin: str, end: str, limit: int | None
) -> tuple[int, tuple[Entry, ...]]:
    """Return the newest revision and the entries with begin <= key < end at that revision."""
    entries: list[Entry] = []
    db.execute("BEGIN")
    try:
        now = revision(db)
        while limit is None or len(entries) < limit:
            size = _PAGE if limit is None else min(_PAGE, limit - len(entries))
            places, values = db.execute(_LIST, (begin, end, size)).fetchone()
            page, at = _PLACES.decode(places), 0
            for key, length, written in page:
                entries.append(Entry(key, values[at : at + length], written))
                at += length
            if len(page) < size:
                break
            begin = entries[-1].key + "\0"
    finally:
        db.execute("COMMIT")
    return now, tuple(entries)


def find_revisions(db: sqlite3.Connection, keys: Iterable[str]) -> tuple[dict[str, int], int]:
    """Return the revisions of the existing keys, and the epoch of the store."""
    found, epoch = db.execute(_FIND_REVISIONS, (_json_text(list(keys)),)).fetchone()
    return _REVISIONS.decode(found), epoch


# ── writing


def write(db: sqlite3.Connection, changes: Sequence[KeyChange]) -> None:
    """Append changes, in order of revision, to the log and apply them to the state."""
    last = {change.key: change for change in changes}
    gone = [change.key for change in last.values() if change.value is None]
    if gone:
        db.execute(_DELETE, (_json_text(gone),))
    previous = place = first = 0
    places: list[tuple[str, int, int | None, int, int]] = []
    values: list[bytes] = []
    at = 1 + len(_NOT_EMPTY)
    for change in changes:
        place = place + 1 if change.revision == previous else 0
        previous = change.revision
        size = None if change.value is None else len(change.value)
        places.append((change.key, at, size, previous, previous << _SHIFT | place))
        if change.value is not None:
            values.append(change.value)
            at += len(change.value)
        if at > _PIECE:
            _write_piece(db, places, values, changes[first:], last)
            first += len(places)
            places, values, at = [], [], 1 + len(_NOT_EMPTY)
    _write_piece(db, places, values, changes[first:], last)


def _write_piece(
    db: sqlite3.Connection,
    places: Sequence[tuple[str, int, int | None, int, int]],
    values: Sequence[bytes],
    changes: Sequence[KeyChange],
    last: dict[str, KeyChange],
) -> None:
    """Write one piece; the state gets only the last change of each key."""
    kept = [
        place
        for place, change in zip(places, changes, strict=False)
        if change.value is not None and last[change.key] is change
    ]
    blob = b"".join((_NOT_EMPTY, *values))
    if kept:
        db.execute(_PUT, (blob, _json_text(kept)))
    if places:
        db.execute(_APPEND_LOG, (blob, _json_text(places)))


def trim(db: sqlite3.Connection, compacted: int) -> None:
    """Drop the log up to a revision, and store that revision."""
    db.execute("DELETE FROM log WHERE id < ?", ((compacted + 1) << _SHIFT,))
    db.execute("INSERT OR REPLACE INTO meta VALUES ('compacted', ?)", (compacted,))
