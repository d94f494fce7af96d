"""Copies of a store: made during writes, verified, and refused when opened by mistake. A restored
store continues above all numbers that were given out."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from control_plane.config import Config
from control_plane.restore_store import copy_all, restore
from control_plane.store import Compacted, Put, copies
from control_plane.store.copies import Facts, make_copy, numbers_above, read_facts
from control_plane.store.records import RESTORED
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy, ConfigError

pytestmark = pytest.mark.behaviour("F-88")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state=str(tmp_path / "state"))


async def _filled(folder: Path, count: int = 3) -> None:
    async with SqliteStore(folder) as store:
        for number in range(count):
            await store.txn({}, [Put(f"k{number}", b"v")])


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize("lost", [None, Facts(0, 4, 9, 1), Facts(0, 70_000, 1 << 40, 1)])
def test_a_restored_store_is_above_all_that_may_be_known(lost: Facts | None) -> None:
    """The numbers exceed those of the copy by the growth of a day, and those of the remains of the
    lost store."""
    copy = Facts(1.0, 5, 10, 1)
    found = numbers_above(copy, lost)
    assert found.epoch >= 5 + copies.EPOCHS_BETWEEN
    assert found.revision >= 10 + copies.REVISIONS_BETWEEN
    if lost is not None:
        assert found.epoch > lost.epoch
        assert found.revision > lost.revision


@pytest.mark.behaviour("F-88")
def test_tables_and_the_log_have_room_for_many_returns() -> None:
    """After 40 restores, numbers in messages stay below 2^53, and row numbers below 2^63."""
    assert 40 * copies.EPOCHS_BETWEEN << 32 < 1 << 53
    assert 40 * copies.REVISIONS_BETWEEN << 10 < 1 << 63


@pytest.mark.behaviour("F-88")
async def test_a_copy_made_during_writes_is_consistent(tmp_path: Path, config: Config) -> None:
    """Keys are written in order. So a copy has the first keys completely, and no others."""
    async with SqliteStore(config.store_path) as store:
        for number in range(50):
            await store.txn({}, [Put(f"k{number:03d}", b"v" * 1000)])

        async def write() -> None:
            for number in range(50, 400):
                await store.txn({}, [Put(f"k{number:03d}", b"v" * 1000)])

        writing = asyncio.create_task(write())
        made = await asyncio.to_thread(copy_all, config, tmp_path / "copies")
        await writing
        assert len((await store.list_prefix("k")).entries) == 400
    file = made / "main.db"
    assert (made.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert [path.name for path in made.iterdir()] == ["main.db"]
    with closing(sqlite3.connect(file)) as db:
        keys = [key for (key,) in db.execute("SELECT key FROM state ORDER BY key")]
    assert len(keys) >= 50
    assert keys == [f"k{number:03d}" for number in range(len(keys))]
    assert read_facts(file).copied_at > 0


@pytest.mark.behaviour("F-88")
async def test_a_copy_is_no_store_until_it_is_restored(tmp_path: Path, config: Config) -> None:
    """A control plane that starts on the file reports an error before it calls any host."""
    await _filled(config.store_path)
    copy = copy_all(config, tmp_path / "copies") / "main.db"
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "twine.db").write_bytes(copy.read_bytes())
    with pytest.raises(ConfigError, match="is a copy, made at 20"):
        async with SqliteStore(folder):
            pass


@pytest.mark.behaviour("F-88")
async def test_a_restored_store_continues_with_higher_revisions_and_no_history(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Watchers list again, join tokens are gone, other records are kept. A second restore does the
    same."""
    async with SqliteStore(config.store_path) as store:
        await store.txn({}, [Put("k", b"old"), Put("join-tokens/t", b"{}")])
        before = store.epoch(), store.revision()
    copy = copy_all(config, tmp_path / "copies")
    await _filled(config.store_path)
    for turn in range(2):
        await restore(config, copy, keep_credentials=False)
        async with SqliteStore(config.store_path) as store:
            assert store.epoch() > before[0] + copies.EPOCHS_BETWEEN
            assert store.revision() > before[1] + copies.REVISIONS_BETWEEN
            keys = [entry.key for entry in (await store.list_prefix("")).entries]
            assert keys == ["k", RESTORED]
            with pytest.raises(Compacted):
                await anext(store.watch("", before[1]))
            await store.txn({}, [Put("new", b"1")])
            before = store.epoch(), store.revision()
        aside = sorted(config.store_path.glob("before-restore-*"))
        assert len(aside) == turn + 1
        assert not (config.store_path / "restoring").exists()
    assert "restored: the copy of 20" in capsys.readouterr().out


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize("damage", ["cut", "rubbish", "missing", "empty"])
async def test_a_damaged_copy_changes_nothing(tmp_path: Path, config: Config, damage: str) -> None:
    """The copy is read to its end before any file is changed."""
    await _filled(config.store_path, 200)
    copy = copy_all(config, tmp_path / "copies") / "main.db"
    data = copy.read_bytes()
    bad = tmp_path / "bad.db"
    if damage != "missing":
        bad.write_bytes(
            {"cut": data[: len(data) // 2], "rubbish": b"x" * 5000, "empty": b""}[damage]
        )
    with pytest.raises(ConfigError):
        await restore(config, bad, keep_credentials=False)
    async with SqliteStore(config.store_path) as store:
        assert len((await store.list_prefix("k")).entries) == 200
        assert store.epoch() == 2


@pytest.mark.behaviour("F-88")
async def test_a_store_in_use_is_not_restored_and_a_file_is_not_overwritten(
    tmp_path: Path, config: Config
) -> None:
    """Two mistakes that an operator in a hurry may make."""
    await _filled(config.store_path)
    copy = copy_all(config, tmp_path / "copies")
    async with SqliteStore(config.store_path):
        with pytest.raises(Busy, match="another control plane uses it"):
            await restore(config, copy, keep_credentials=False)
    with pytest.raises(ConfigError, match="already exists"):
        make_copy(config.store_path / "twine.db", copy / "main.db", 1.0)
    with pytest.raises(ConfigError, match="no store file"):
        copy_all(Config(state=str(tmp_path / "nothing")), tmp_path / "copies2")
    assert list((tmp_path / "copies2").iterdir()) == []


@pytest.mark.behaviour("F-88")
async def test_the_stores_of_data_centers_are_copied_at_rest_and_restored_together(
    tmp_path: Path,
) -> None:
    """Copies made at different moments would disagree about the owner of a machine."""
    own = tmp_path / "dc1"
    config = Config(state=str(tmp_path / "state"), broker_stores={"dc1": str(own)})
    for folder in (config.store_path, own):
        await _filled(folder)
    async with SqliteStore(own):
        with pytest.raises(Busy):
            copy_all(config, tmp_path / "copies")
    assert not list((tmp_path / "copies").iterdir())
    copy = copy_all(config, tmp_path / "copies")
    assert sorted(path.name for path in copy.iterdir()) == ["dc-dc1.db", "main.db"]
    with pytest.raises(
        ConfigError, match="has the stores main; the configuration has dc-dc1, main"
    ):
        await restore(config, copy / "main.db", keep_credentials=False)
    await restore(config, copy, keep_credentials=False)
    async with SqliteStore(own) as store:
        assert store.epoch() > copies.EPOCHS_BETWEEN
        assert await store.get(RESTORED) is None
