"""Histories of clients under faults of leaders and members are linearizable single registers.

`make store-faults` runs this for longer. Clients write jobs and entitlements through the front ends
of two control planes. They assign machines by compare-and-set on the store, as brokers do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import os
import random
import signal
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from agent.api import ImageFormat, Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.client import ControlPlaneClient
from control_plane.config import EtcdSettings
from control_plane.store import Put
from control_plane.store.etcd import EtcdStore
from tests.etcd import Cluster, Replica, etcd_cluster
from tests.linearizability import NEVER, Recorder, RegisterOperation, violations_in
from wire.errors import Conflict, NotFound, TwineError

PATIENCE_S = 240
ROUNDS = int(os.environ.get("TWINE_HISTORIES", "1"))
PER_KEY = 60
"""Number of operations on one key; then clients take the next one, so that each search stays small.
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with etcd_cluster(3) as cluster:
        yield cluster


async def push(client: ControlPlaneClient) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("bin"))
    data = buffer.getvalue()
    digest = "sha256:" + hashlib.sha256(data).hexdigest()

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    await client.push_image(digest, ImageFormat.TAR, chunks())
    return digest


class Clients:
    """Operations of several clients on jobs and entitlements, at any control plane that answers."""

    def __init__(self, recorder: Recorder, image: str) -> None:
        self.recorder, self._image = recorder, image
        self._written = self._done = 0
        self.stopping = False
        self.replicas: list[Replica] = []

    async def run(self, seed: int) -> None:
        """Do one operation after the other until stopped."""
        chance = random.Random(seed)
        while not self.stopping:
            replica = self.replicas[seed % 2]  # a paused leader delays some clients, not all
            kind = chance.choice(("entitlement", "job"))
            key = f"{kind[0]}{self._done // PER_KEY}"
            async with ControlPlaneClient(f"unix:{replica.socket}") as client:
                if chance.random() < 0.5:
                    await self._read(client, kind, key)
                else:
                    await self._write(client, kind, key)
            await asyncio.sleep(0.01)

    async def _read(self, client: ControlPlaneClient, kind: str, key: str) -> None:
        called, value = time.monotonic(), None
        try:
            if kind == "job":
                value = int((await client.get_job(key)).record.spec.environment["N"])
            else:
                value = (await client.get_entitlement(key)).record.spec.machines
        except NotFound:
            pass
        except TwineError:
            return  # the answer does not state the outcome
        self._note(RegisterOperation(key, "read", value, called, time.monotonic()))

    async def _write(self, client: ControlPlaneClient, kind: str, key: str) -> None:
        self._written += 1
        value, called, answered = self._written, time.monotonic(), NEVER
        try:
            if kind == "job":
                await client.apply_job(self._job(key, value))
            else:
                await client.put_entitlement(key, EntitlementSpec(machines=value))
            answered = time.monotonic()
        except TwineError as e:
            if isinstance(e.__cause__, aiohttp.ClientConnectorError):
                return  # it was never sent
        self._note(RegisterOperation(key, "write", value, called, answered))

    def _job(self, name: str, number: int) -> JobSpec:
        return JobSpec(
            name=name,
            entitlement="front",
            tasks=1,
            image=self._image,
            command=["/bin/true"],
            environment={"N": str(number)},
            limits=Limits(memory_max_bytes=64 << 20),
        )

    def _note(self, operation: RegisterOperation) -> None:
        self.recorder.add(operation)
        self._done += operation.answered < NEVER


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


async def faults(
    three: Cluster, clients: Clients, start: Callable[[str], Replica], stack: ExitStack
) -> None:
    """Pause, kill and cut components; between two faults, wait until clients are answered again."""
    first, second = clients.replicas

    async def some_answers() -> None:
        goal = len([d for d in clients.recorder.done if d.answered < NEVER]) + 100
        await until(lambda: sum(d.answered < NEVER for d in clients.recorder.done) >= goal)

    for turn in range(ROUNDS):
        await some_answers()
        first.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(second.until, "serving at")
        await some_answers()
        first.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(first.process.wait, PATIENCE_S)
        await some_answers()
        first = start(f"a{turn}")
        clients.replicas[:] = [first, second]
        await asyncio.to_thread(first.until, "standing by")
        three.members[turn % 3].kill()
        await some_answers()
        second.end()
        await asyncio.to_thread(first.until, "serving at")
        three.members[turn % 3].start()
        await asyncio.to_thread(three.wait)
        second = start(f"b{turn}")
        clients.replicas[:] = [first, second]
        await asyncio.to_thread(second.until, "standing by")
    await some_answers()


@pytest.mark.behaviour("AV1", "AV2")
async def test_jobs_and_entitlements_are_registers_while_leaders_pause_and_die(
    three: Cluster, tmp_path: Path
) -> None:
    """Covers the answers of a leader that resumes after a pause, and writes without an answer."""
    with ExitStack() as stack:

        def start(name: str) -> Replica:
            where = {"prefix": f"/{tmp_path.name}", "state": "shared"}
            replica = Replica(tmp_path, name, three.urls, ttl_s=2, **where)
            stack.callback(replica.end)
            return replica

        replicas = [start("first")]
        await asyncio.to_thread(replicas[0].until, "serving at")
        replicas.append(start("second"))
        await asyncio.to_thread(replicas[1].until, "standing by")
        async with ControlPlaneClient(f"unix:{replicas[0].socket}") as client:
            await client.put_entitlement("front", EntitlementSpec(machines=1))
            clients = Clients(Recorder(), await push(client))
        clients.replicas = replicas
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for seed in range(6):
                group.create_task(clients.run(seed))
            await faults(three, clients, start, stack)
            clients.stopping = True
    history = clients.recorder.done
    assert {"read", "write"} == {
        operation.kind for operation in history if operation.answered < NEVER
    }
    assert [operation for operation in history if operation.answered == NEVER], (
        "no fault was noticed"
    )
    assert violations_in(history) == []
    assert violations_in(with_one_stale_read(history)), "the checker does not see a stale read"


def with_one_stale_read(history: list[RegisterOperation]) -> list[RegisterOperation]:
    """Return the history with one more client that reads the value of the beginning."""
    last = max(history, key=lambda operation: operation.called if operation.answered < NEVER else 0)
    return [*history, RegisterOperation(last.key, "read", -1, last.called + 10, last.called + 11)]


@pytest.mark.behaviour("AV2")
async def test_a_machine_is_assigned_by_one_leader_at_a_time(
    three: Cluster, tmp_path: Path
) -> None:
    """Leaders assign machines by compare-and-set; one of them never learns that it was deposed."""
    settings = EtcdSettings(endpoints=three.urls, prefix=f"/{tmp_path.name}", ttl_s=2)
    recorder, made = Recorder(), 0

    async def assign(store: EtcdStore, chance: random.Random) -> None:
        nonlocal made
        key = f"machines/m{made // PER_KEY}"
        made += 1
        called, operation = time.monotonic(), None
        try:
            entry = await store.get(key)
            value = None if entry is None else int(entry.value)
            if store.failure():
                return
            recorder.add(RegisterOperation(key, "read", value, called, time.monotonic()))
            called, number = time.monotonic(), chance.randrange(1 << 40)
            operation = RegisterOperation(key, "swap", number, called, expected=value)
            at = 0 if entry is None else entry.revision
            await store.txn({key: at}, [Put(key, b"%d" % number)])
        except Conflict:
            return  # nothing was changed
        except TwineError:
            if operation is not None:
                recorder.add(operation)  # the change may have been made
            return
        recorder.add(dataclasses.replace(operation, answered=time.monotonic()))

    async def client(store: EtcdStore, seed: int, until_s: float) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until_s:
            await assign(store, chance)
            await asyncio.sleep(0.001)

    async with asyncio.timeout(PATIENCE_S), EtcdStore(settings) as first:
        end = time.monotonic() + 8
        async with asyncio.TaskGroup() as group:
            for seed in range(4):
                group.create_task(client(first, seed, end))
            await asyncio.sleep(1)
            assert first._leadership is not None
            assert first._leadership._renewing is not None
            first._leadership._renewing.cancel()  # as if it were paused
            async with EtcdStore(settings) as second:
                three.members[0].kill()
                for seed in range(4, 8):
                    group.create_task(client(second, seed, end))
                await until(lambda: time.monotonic() >= end)
                await asyncio.sleep(1)
                three.members[0].start()
                await asyncio.to_thread(three.wait)
    assert len({operation.key for operation in recorder.done}) > 1
    assert violations_in(recorder.done) == []
