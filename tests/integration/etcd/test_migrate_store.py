"""`migrate-store` moves a region's store between SQLite and etcd, and is killed at any step."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from control_plane import migrate_store
from control_plane.client import ControlPlaneClient
from control_plane.config import Config, EtcdSettings
from control_plane.daemon import serve
from control_plane.restore_store import copy_all, restore
from control_plane.store import Delete, Put, Store, etcd, migration
from control_plane.store.bulk import put_all
from control_plane.store.etcd import EtcdStore
from control_plane.store.etcd_client import EtcdClient
from control_plane.store.leadership import Leadership
from control_plane.store.opening import main_store, stopped_store
from control_plane.store.records import RESTORED
from control_plane.store.sqlite import SqliteStore
from tests.etcd import Cluster, etcd_cluster
from vm_lab.fleet import SETTINGS, Fleet, FleetHost
from wire.errors import Busy, ConfigError, Conflict, TwineError

PATIENCE_S = 120
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with etcd_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def both(one: Cluster, tmp_path: Path) -> Config:
    """A configuration with a state folder and a cluster."""
    etcd = EtcdSettings(endpoints=one.urls, prefix=f"/{tmp_path.name}", ttl_s=2, standby=False)
    return Config(state=str(tmp_path / "state"), etcd=etcd)


def sqlite_of(config: Config) -> Config:
    return msgspec.structs.replace(config, etcd=EtcdSettings())


async def fill(config: Config, records: int = 1234) -> None:
    """Write records into the store of a configuration; some are written twice, some removed."""
    async with main_store(config) as store:
        await put_all(store, ((f"k/{n:05}", b"%d" % n * 50) for n in range(records)))
        await store.txn({}, [Put("k/00007", b""), Delete("k/00008"), Put("z/ü", b"\0" * 200_000)])


async def held(store: Store) -> dict[str, bytes]:
    return {e.key: e.value for e in (await store.list_prefix("")).entries}


async def openable(config: Config) -> list[str]:
    """Return which of the two stores a control plane could open."""
    found = []
    for name, one in (("sqlite", sqlite_of(config)), ("etcd", config)):
        if name == "sqlite" and not (config.store_path / "twine.db").exists():
            continue
        try:
            async with main_store(one) as store:
                if (await store.list_prefix("", limit=1)).entries:
                    found.append(name)
        except ConfigError as e:
            if not re.search("moved to another engine|is incomplete", str(e)):
                raise
    return found


async def moved(config: Config, *, to_etcd: bool) -> None:
    """Run the command until its end, as an operator would after a crash."""
    while True:
        try:
            return await migrate_store.move(config, to_etcd=to_etcd)
        except Busy:  # the lease of a killed process
            await asyncio.sleep(0.2)


@pytest.mark.behaviour("AV1")
async def test_a_store_moves_to_etcd_and_back_with_all_records_and_rising_numbers(
    both: Config,
) -> None:
    """Numbers that hosts and clients compare keep rising, so no new store is older (ADR 0111)."""
    await fill(sqlite_of(both))
    for to_etcd in (True, False, True, False):
        source, target = (sqlite_of(both), both) if to_etcd else (both, sqlite_of(both))
        async with stopped_store(source) as store:
            before, epoch, revision = await held(store), store.epoch(), store.revision()
            known = await store.get("k/00001")
        await moved(both, to_etcd=to_etcd)
        async with main_store(target) as store:
            assert await held(store) == before
            assert store.epoch() > epoch
            assert store.revision() > revision
            entry = await store.get("k/00001")
            assert entry.revision > revision
            with pytest.raises(Conflict):
                await store.txn({"k/00001": known.revision}, [Put("k/00001", b"late")])
            with pytest.raises(Conflict):
                await store.txn({"absent": known.revision}, [Put("absent", b"late")])
            watch = store.watch("k/", store.revision())
            at = await store.txn({"k/00001": entry.revision}, [Put("k/00001", os.urandom(8))])
            assert (await anext(watch)).revision == at
        assert await openable(both) == ["etcd" if to_etcd else "sqlite"]


@pytest.mark.behaviour("AV2")
@pytest.mark.parametrize("to_etcd", [True, False])
async def test_a_crash_after_any_step_leaves_at_most_one_store_and_the_command_continues(
    both: Config, to_etcd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash follows each durable step; then the region and the command continue."""
    await fill(sqlite_of(both), 300)
    if not to_etcd:
        await moved(both, to_etcd=True)
    source = sqlite_of(both) if to_etcd else both

    class Killed(Exception):
        pass

    messages: list[str] = []

    def report(text: str, **_: object) -> None:
        step = re.sub(r"\d+|equal, .*", "", text)
        if step not in messages:
            messages.append(step)
            raise Killed

    before: dict[str, bytes] = {}
    monkeypatch.setattr(click, "echo", report)
    while True:
        try:
            async with stopped_store(source) as store:  # the region continued between two attempts
                await store.txn(
                    {}, [Put("k/00003", b"%d" % len(messages)), Put(f"n/{len(messages)}", b"")]
                )
                before = await held(store)
        except ConfigError:
            assert "marked as moved" in " ".join(messages)
        try:
            await migrate_store.move(both, to_etcd=to_etcd)
        except Killed:
            assert len(await openable(both)) <= 1
            continue
        break
    assert len(messages) == 6
    async with main_store(both if to_etcd else sqlite_of(both)) as store:
        assert await held(store) == before


@pytest.mark.parametrize("to_etcd", [True, False])
async def test_a_crash_between_any_two_files_or_notes_leaves_at_most_one_store(
    both: Config, to_etcd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash is before and after each write of the command outside of the records."""
    await fill(sqlite_of(both), 30)
    if not to_etcd:
        await moved(both, to_etcd=True)

    class Killed(Exception):
        pass

    count = last = 0

    def counted(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def stop() -> None:
            nonlocal count
            count += 1
            if count == last:
                raise Killed

        async def later(*given: object, **named: object) -> object:
            stop()
            result = await real(*given, **named)
            stop()
            return result

        def now(*given: object, **named: object) -> object:
            stop()
            result = real(*given, **named)
            stop()
            return result

        monkeypatch.setattr(kind, name, later if asyncio.iscoroutinefunction(real) else now)

    counted(EtcdStore, "set_note")
    counted(migrate_store, "_write_note")
    counted(Path, "replace")
    counted(migrate_store.shutil, "rmtree")
    counted(migration, "write_all")
    async with stopped_store(sqlite_of(both) if to_etcd else both) as store:
        before = await held(store)
    while True:
        count, last = 0, last + 1
        try:
            await migrate_store.move(both, to_etcd=to_etcd)
            break
        except Killed:
            count = -1000
            assert len(await openable(both)) <= 1
    async with main_store(both if to_etcd else sqlite_of(both)) as store:
        assert await held(store) == before


def killed_after(config: Path, to: str, lines: int) -> int:
    """Run the command, kill it after this number of output lines; return its exit code."""
    argv = ("-m", "control_plane.daemon", "migrate-store", "--to", to, "--config", str(config))
    while True:
        with subprocess.Popen(
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            if all(process.stdout.readline() for _ in range(lines)):
                process.kill()
            _, error = process.communicate()
        if b"another control plane leads" not in error:
            return process.returncode
        time.sleep(0.3)  # the lease of the killed process


@pytest.mark.behaviour("AV1")
async def test_the_command_is_killed_again_and_again_and_nothing_is_lost(both: Config) -> None:
    """SIGKILL hits the real process after each line of its output, and while it copies."""
    await fill(sqlite_of(both), 20_000)
    async with stopped_store(sqlite_of(both)) as store:
        before = await held(store)
    config = Path(both.state).with_suffix(".toml")
    config.write_text(
        f'state = "{both.state}"\n[etcd]\nendpoints = ["{both.etcd.endpoints[0]}"]\n'
        f'prefix = "{both.etcd.prefix}"\nttl_s = 2\n'
    )
    turns = (("etcd", 1), ("etcd", 2), ("etcd", 9), ("sqlite", 1), ("sqlite", 9))
    codes = [await asyncio.to_thread(killed_after, config, *turn) for turn in turns]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, -signal.SIGKILL, 0]
    async with main_store(sqlite_of(both)) as store:
        assert await held(store) == before


async def test_a_store_in_use_is_not_moved_and_nothing_is_changed(both: Config) -> None:
    await fill(sqlite_of(both), 10)
    async with main_store(sqlite_of(both)):
        with pytest.raises(Busy, match="another control plane uses it"):
            await migrate_store.move(both, to_etcd=True)
    assert await openable(both) == ["sqlite"]


class OtherRole(Leadership):
    """Leads another role on the same store."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.key += b"-shard-1"


@pytest.mark.behaviour("AV2")
async def test_no_leader_of_another_role_and_no_migration_have_one_store_together(
    both: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of them is refused; a completed migration blocks no leader."""
    await fill(both, 10)

    async with EtcdClient(both.etcd) as client:
        root = f"{both.etcd.prefix}/meta/".encode()
        other = OtherRole(client, root, both.etcd.ttl_s, "other")
        await other.campaign(None)
        with pytest.raises(Busy, match=r"another process has it \(other\)"):
            await migrate_store.move(both, to_etcd=False)
        await other.resign()
        async with EtcdStore(both.etcd, migrating=True):
            monkeypatch.setattr(etcd, "Leadership", OtherRole)
            with pytest.raises(Busy, match="another process has it"):
                await EtcdStore(both.etcd).__aenter__()
            monkeypatch.undo()
    assert await openable(both) == ["etcd"]


async def test_ends_that_do_not_fit_are_refused_with_one_error(both: Config) -> None:
    with pytest.raises(ConfigError, match="has no etcd cluster"):
        await migrate_store.move(sqlite_of(both), to_etcd=True)
    with pytest.raises(ConfigError, match="there is no store in"):
        await migrate_store.move(both, to_etcd=True)
    await fill(sqlite_of(both), 10)
    async with main_store(sqlite_of(both)) as store:
        await store.txn({}, [Put("broker-stores/dc1", b"{}")])
    with pytest.raises(ConfigError, match="machines of dc1 are in a separate store"):
        await migrate_store.move(both, to_etcd=True)
    async with main_store(sqlite_of(both)) as store:
        await store.txn({}, [Delete("broker-stores/dc1"), Put("k/big", b"\0" * (300 << 10))])
    with pytest.raises(ConfigError, match="1 records have more than 262144 bytes, k/big"):
        await migrate_store.move(both, to_etcd=True)
    async with main_store(sqlite_of(both)) as store:
        await store.txn({}, [Delete("k/big")])
    async with main_store(both) as store:
        await store.txn({}, [Put("another", b"region")])
    with pytest.raises(ConfigError, match="already has a store with records"):
        await migrate_store.move(both, to_etcd=True)
    assert await openable(both) == ["sqlite", "etcd"]


@asynccontextmanager
async def plane(config: Config) -> AsyncIterator[ControlPlaneClient]:
    """Run the production daemon on a configuration."""
    stopping = asyncio.Event()
    serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(config, stopping, serving.set_result))
    try:
        await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        async with ControlPlaneClient(f"unix:{config.socket}") as client:
            yield client
    finally:
        stopping.set()
        await running


@pytest.mark.behaviour("SH3", "AV3")
async def test_a_region_moves_to_etcd_and_back_and_no_task_restarts(
    both: Config, tmp_path: Path
) -> None:
    """Agents accept the new store's terms, and running tasks are adopted."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        listen = f"127.0.0.1:{unused.getsockname()[1]}"
    config = msgspec.structs.replace(
        both, listen=listen, socket=str(tmp_path / "cp.sock"), scheduler=SETTINGS
    )
    hosts = [FleetHost(tmp_path, number, port) for number in range(3)]

    def running() -> dict[str, str]:
        units = (u for h in hosts for u in h.machine.systemd.units("twine-task-*"))
        return {u.unit: u.invocation_id for u in units}

    async with asyncio.timeout(PATIENCE_S):
        try:
            async with plane(sqlite_of(config)) as client:
                region = Fleet(client, hosts, "")
                await region.join_hosts()
                await region.entitle()
                await region.deploy(3)
                before = running()
                assert len(before) == 3
            for tasks, to_etcd in ((4, True), (5, False)):
                await moved(config, to_etcd=to_etcd)
                target = config if to_etcd else sqlite_of(config)
                async with plane(target) as client:
                    region = Fleet(client, hosts, "")
                    await region._wait_until(region._all_ready)
                    await region.deploy(tasks)
                    assert running().items() >= before.items()
                    assert len(running()) == tasks
                source = sqlite_of(config) if to_etcd else config
                with pytest.raises(TwineError, match="was moved to another engine"):
                    async with plane(source):
                        pass
        finally:
            await asyncio.gather(*(host.stop() for host in hosts))


@pytest.mark.behaviour("AV1")
async def test_a_restored_cluster_is_installed_as_a_store_that_needs_approval(
    both: Config, tmp_path: Path
) -> None:
    """Follows docs/scale.md for a cluster restored from a snapshot."""
    await fill(both, 10)
    await moved(both, to_etcd=False)
    sqlite = sqlite_of(both)
    copy = await asyncio.to_thread(copy_all, sqlite, tmp_path / "copies")
    await restore(sqlite, copy, keep_credentials=False)
    async with main_store(sqlite) as store:
        assert await store.get(RESTORED) is not None
        assert await store.get("k/00001") is not None
    await moved(both, to_etcd=True)
    async with main_store(both) as store:
        assert await store.get(RESTORED) is not None


async def test_a_started_control_plane_does_not_open_half_a_store(both: Config) -> None:
    """A standby that waits for the lease of a killed migration exits with the reason."""
    await fill(sqlite_of(both), 10)
    async with EtcdStore(both.etcd, migrating=True) as target:
        end = migrate_store.EtcdEnd(target, "/x")
        source = migrate_store.SqliteSource(both.store_path)
        async with source.store:
            with pytest.raises(KeyError):
                await migration.migrate(source, end, lambda _: {}[""])
    with pytest.raises(ConfigError, match=r"migration into it, begun at .* is incomplete"):
        async with main_store(both):
            pass
    async with SqliteStore(both.store_path) as store:
        assert await store.get("k/00001") is not None
