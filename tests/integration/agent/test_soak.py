"""Thousands of starts and stops with faults in between leave nothing behind.

The services and the btrfs are real; service manager and networks are in memory. CI runs 1,000
cycles; `make soak` sets TWINE_SOAK for more.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.logging import LogCaptureHandler
from aiohttp import web_app
from builders import FakeHost, a_spec, a_tar, chunks_of, digest_of
from msgspec import structs
from on_btrfs import machine, mounted, use_real_programs

from agent.api import ImageFormat, TaskState
from agent.client import AgentClient
from agent.machine import HostAccess
from agent.runtime.journal import Journal
from agent.tasks import supervisor
from wire.errors import HostError, NotFound, SystemdError, TwineError

pytestmark = [pytest.mark.root, pytest.mark.behaviour("F-27")]

CYCLES = int(os.environ.get("TWINE_SOAK", "1000"))
SEED = int(os.environ.get("TWINE_SOAK_SEED", "1"))
TASKS = 16
AGENT_CYCLES = 125
"""Number of starts and stops after which the agent itself is restarted."""
FAULT_SHARE = 0.03
"""Share of failing calls among those that change the host."""
CHANGES = {"start_transient", "stop", "reset_failed", "set_properties"}
CHANGES |= {"snapshot", "delete", "create", "set_read_only"}
RSS_SHARE = 1.10
WARM_SHARE = 0.3
"""Share of the run after which memory is stable: the event log is full, for example."""


class Faults:
    """Fails calls that change the host, before or after their effect."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.share = FAULT_SHARE
        self.made = 0

    def call(self, real: Callable[..., Any], error: Exception, *args: Any, **kwargs: Any) -> Any:
        dice = self._chance.random()
        if dice < self.share / 2:
            self.made += 1
            raise error
        found = real(*args, **kwargs)
        if dice < self.share:
            self.made += 1
            raise error
        return found

    def machine(self, host: FakeHost) -> HostAccess:
        whole = machine(host)
        systemd = _Faulty(self, whole.systemd, SystemdError("the bus was lost"))
        btrfs = _Faulty(self, whole.btrfs, HostError("input/output error"))
        return structs.replace(whole, systemd=systemd, btrfs=btrfs)


class _Faulty:
    def __init__(self, faults: Faults, real: Any, error: Exception) -> None:
        self._faults, self._real, self._error = faults, real, error

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name not in CHANGES:
            return real
        return lambda *args, **kwargs: self._faults.call(real, self._error, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Left:
    """The objects on a host; `resident` in KiB is compared separately."""

    descriptors: int
    threads: int
    processes: int
    units: int
    roots: int
    subvolumes: int
    staging: int
    networks: int
    mounts: int
    resident: int


def _now(host: FakeHost) -> Left:
    gc.collect()
    process = psutil.Process()
    real = machine(host).btrfs
    return Left(
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        processes=len(process.children()),
        units=len(host.units()),
        roots=len(os.listdir(host.state / "tasks")),
        subvolumes=sum(len(real.children(host.state / f)) for f in ("tasks", "images", "staging")),
        staging=len(os.listdir(host.state / "staging")),
        networks=len(host.fake.network.networks),
        mounts=Path("/proc/self/mounts").read_text().count(str(host.folder)),
        resident=process.memory_info().rss >> 10,
    )


class Soak:
    """Runs the cycles."""

    def __init__(self, host: FakeHost, chance: random.Random) -> None:
        self._host = host
        self._chance = chance
        self._generation = 0
        self.done = 0
        self.refused = 0
        self.faults = Faults(chance)

    async def run(self, cycles: int, images: list[str]) -> None:
        """Start and stop this number of tasks; the agent is restarted from time to time."""
        until = self.done + cycles
        while self.done < until:
            stop_at = min(until, self.done + AGENT_CYCLES)
            async with (
                self._host.agent(self.faults.machine(self._host)) as client,
                asyncio.TaskGroup() as group,
            ):
                for number in range(TASKS):
                    group.create_task(self._cycles(client, f"t{number}", images, stop_at))
            # aiohttp keeps its last thousand handlers, and each of them keeps a whole agent that
            # has ended. Outside of tests a process has one agent.
            web_app._cached_build_middleware.cache_clear()

    async def _cycles(
        self, client: AgentClient, name: str, images: list[str], stop_at: int
    ) -> None:
        while self.done < stop_at:
            self.done += 1
            await self._insist(lambda: self._put(client, name, images))
            await self._until(client, name, TaskState.RUNNING)
            if self._chance.random() < 0.2:  # the task exits without a request, and is restarted
                self._host.fake.systemd.exit(f"twine-task-{name}.service", 1)
                await self._until(client, name, TaskState.RUNNING)
            if self._chance.random() < 0.02:
                self._host.fake.systemd.lose_bus()
            await self._insist(lambda: client.delete_task(name))
            await self._until(client, name, None)

    async def _put(self, client: AgentClient, name: str, images: list[str]) -> None:
        self._generation += 1
        spec = a_spec(generation=self._generation, image=self._chance.choice(images))
        await client.put_task(name, spec)

    async def _insist(self, ask: Callable[[], Any]) -> None:
        """Repeat the request until it is acknowledged, as a control plane does."""
        while True:
            try:
                await ask()
                return
            except NotFound:
                return
            except TwineError:
                self.refused += 1
                await asyncio.sleep(0)

    async def _until(self, client: AgentClient, name: str, state: TaskState | None) -> None:
        after = (await client.get_events(0)).latest
        while True:
            try:
                if (await client.get_task(name)).state is state:
                    return
            except NotFound:
                assert state is None, f"{name} was lost"
                return
            after = (await client.get_events(after, wait_s=1)).latest


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHost]:
    """Yield a host on btrfs with short retry intervals."""
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)
    monkeypatch.setattr(supervisor, "CONFLICT_S", 0.01)
    with mounted(tmp_path) as host:
        use_real_programs(host, "tar", "find")
        yield host


def _torn(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes of records fail as well: the disk is full for a moment."""
    save = Journal._replace

    def sometimes(journal: Journal, *args: Any) -> None:
        faults.call(save, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), journal, *args)

    monkeypatch.setattr(Journal, "_replace", sometimes)


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """Disable pytest's log capture: with 10,000 cycles its records were half of all memory."""
    capturing = [h for h in logging.root.handlers if isinstance(h, LogCaptureHandler)]
    levels = [handler.level for handler in capturing]
    for handler in capturing:
        handler.setLevel(logging.CRITICAL + 1)
    yield
    for handler, level in zip(capturing, levels, strict=True):
        handler.setLevel(level)


@pytest.mark.behaviour("F-27")
@pytest.mark.usefixtures("nothing_kept")
def test_f27_a_thousand_starts_and_stops_with_faults_leave_nothing(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Descriptors, units, subvolumes and mounts are as before (P9); memory is within a tenth."""
    soak = Soak(host, random.Random(SEED))
    tars = [a_tar(app=str(n)) for n in range(3)]
    images = [digest_of(tar) for tar in tars]

    async def whole() -> tuple[Left, Left, list[str]]:
        async with host.agent(machine(host)) as client:
            for tar, digest in zip(tars, images, strict=True):
                await client.put_image(digest, ImageFormat.TAR, chunks_of(tar))
        with monkeypatch.context() as patch:
            _torn(soak.faults, patch)
            await soak.run(round(CYCLES * WARM_SHARE), images)
            before = _now(host)
            await soak.run(CYCLES - soak.done, images)
        after = _now(host)
        async with host.serving(machine(host)) as (services, client):
            services.accounts.recheck_s = 0.05
            accounts = (await client.get_accounts()).accounts
        return before, after, [f"{a.kind} {a.name}: {a.why}" for a in accounts if a.wrong]

    began = time.monotonic()
    before, after, wrong = asyncio.run(whole())
    with capsys.disabled():
        print(
            f"\nsoak: {soak.done} cycles, {soak.faults.made} faults, {soak.refused} refusals, "
            f"{time.monotonic() - began:.0f} s\n  before {before}\n  after  {after}"
        )
    assert wrong == []
    assert replace(after, resident=0) == replace(before, resident=0)
    assert (after.units, after.roots, after.staging) == (0, 0, 0)
    assert after.resident <= before.resident * RSS_SHARE
    assert soak.faults.made > CYCLES // 20
