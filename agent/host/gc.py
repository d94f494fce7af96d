"""Accounts for each object of the agent on this host: its owner, why it stays, what is wrong.

Also removes unused images, and layers that no image is built on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agent.api.accounts import Account, Accounts
from agent.host.core.census import FoundOnHost, SubvolumeStore, account_for, confirmed
from agent.images.core.retention import (
    ImageUse,
    LayerUse,
    RetentionDecision,
    RetentionLimits,
    decide_images,
    decide_layers,
)
from agent.images.images import HostImages
from agent.machine import Btrfs, HostAccess
from agent.network.networks import Networks
from agent.runtime.crashpoints import crash_point
from agent.runtime.journal import NAME
from agent.tasks.context import HostCapacity, TaskContext
from agent.tasks.queries import TaskQueries
from wire.errors import Conflict, NotFound, TwineError

log = logging.getLogger(__name__)

COLLECT_S = 600.0
"""Seconds between two searches for old objects, and between two checks of the free space."""
RECHECK_S = 2.0
"""Seconds until an error is checked again: by then a change in progress has ended."""
STEP_S = 60.0
"""A wall clock that gained more than this on the clock of the boot was set, or the host was off."""


class HostInspector:
    """Inspects the objects of the agent on the host, removes unused ones, and repairs errors."""

    def __init__(
        self,
        folders: tuple[Path, Path],
        host: TaskContext,
        capacity: HostCapacity,
        networks: Networks,
        images: HostImages,
        tasks: TaskQueries,
        machine: HostAccess,
        limits: RetentionLimits,
    ) -> None:
        """`folders` are the state folder and the run folder."""
        self._state, self._run = folders
        self._units, self._storage, self._lanes = host.units, host.storage, capacity.lanes
        self._volumes_of_host = capacity.volumes
        self._networks = networks
        self._images = images
        self._tasks = tasks
        self._machine = machine
        self._limits = limits
        self._ages = ImageAges(self._state, machine.boottime_s)
        self.recheck_s = RECHECK_S
        self._collecting = asyncio.Lock()

    async def inspect(self) -> list[Account]:
        """Return an account of each object; an error counts only if two inspections found it."""
        accounts = account_for(await self._inspect_once())
        if not any(account.wrong for account in accounts):
            return accounts
        await asyncio.sleep(self.recheck_s)
        return confirmed(accounts, account_for(await self._inspect_once()))

    async def _inspect_once(self) -> FoundOnHost:
        units = await self._units.all("twine-*.service")
        tasks, unreadable = self._tasks.known()
        seen = await self._lanes.run("btrfs", self._read_disk)
        again, _ = self._tasks.known()
        observed = await self._lanes.run("files", self._machine.observe, self._state, self._run)
        decisions = await self._lanes.run("btrfs", self._decisions)
        ports = await self._lanes.run("ports", self._machine.network.gates)
        # A task that was added or removed meanwhile counts with its latest state.
        return replace(
            seen,
            tasks={**tasks, **again},
            unreadable=unreadable,
            units={u.unit: u.active for u in units if u.active != "inactive" or u.control_group},
            is_receiving=self._images.is_receiving,
            cgroups=observed.cgroups,
            namespaces=observed.namespaces,
            veths=observed.veths,
            ports=ports,
            mounts=observed.mounts,
            decisions=decisions,
        )

    def _read_disk(self) -> FoundOnHost:
        btrfs, state = self._machine.btrfs, self._state
        roots = btrfs.children(state / "tasks")
        images, layers = self._store("images"), self._store("layers")
        sizes = {("root", name): btrfs.exclusive_bytes(state / "tasks" / name) for name in roots}
        for kind, folder, store in (("image", "images", images), ("layer", "layers", layers)):
            for name in store.subvolumes:
                sizes[kind, name] = btrfs.exclusive_bytes(state / folder / name)
        files = [name for name in os.listdir(state) if not name.startswith(".fsck")]
        volumes, scratch, others = self._volumes()
        sizes |= {("volume", n): btrfs.exclusive_bytes(state / "volumes" / n) for n in volumes}
        sizes |= {("scratch", n): btrfs.exclusive_bytes(state / "scratch" / n) for n in scratch}
        files += others
        files += [f"tasks/{name}" for name in os.listdir(state / "tasks") if name not in roots]
        for folder, store in (("images", images), ("layers", layers)):
            expected = {*store.subvolumes, *(f"{name}.json" for name in store.described)}
            files += [f"{folder}/{n}" for n in os.listdir(state / folder) if n not in expected]
        return FoundOnHost(
            records=[n for n in os.listdir(state / "journal") if n != NAME],
            roots=roots,
            scratch=scratch,
            volumes=volumes,
            images=images,
            layers=layers,
            staging=os.listdir(state / "staging"),
            files=files,
            bytes={key: size for key, size in sizes.items() if size is not None},
        )

    def _volumes(self) -> tuple[list[str], list[str], list[str]]:
        """Return the persistent volumes, the scratch volumes, and other files in their folders."""
        state, btrfs = self._state, self._machine.btrfs
        names_by_folder: dict[str, list[str]] = {}
        others = []
        for folder in self._volumes_of_host.folders():
            names_by_folder[folder] = btrfs.children(state / folder)
            names = set(os.listdir(state / folder)).difference(names_by_folder[folder])
            others += [f"{folder}/{name}" for name in names]
        top = state / "volumes"
        others += [f"volumes/{p.name}" for p in top.iterdir() if not p.is_dir()]
        scratch = names_by_folder.pop("scratch")
        kept = [
            f"{f}/{n}".removeprefix("volumes/")
            for f, names in names_by_folder.items()
            for n in names
        ]
        return kept, scratch, others

    def _store(self, name: str) -> SubvolumeStore:
        folder = self._state / name
        subvolumes = self._machine.btrfs.children(folder)
        return SubvolumeStore(
            subvolumes,
            [p.stem for p in folder.glob("*.json")],
            [n for n in subvolumes if not _is_read_only(self._machine.btrfs, folder / n)],
        )

    def _decisions(self) -> dict[tuple[str, str], RetentionDecision]:
        """Return the decision of each image and layer by use, age and free space."""
        _, free = self._machine.btrfs.free_bytes(self._state)
        infos = self._images.all()
        users = {info.digest: self._tasks.tasks_using(info.digest) for info in infos}
        self._ages.update([digest for digest, tasks in users.items() if tasks])
        uses = [
            ImageUse(
                digest=info.digest,
                last_used=self._images.last_used(info.digest),
                bytes=info.stream_bytes,
                tasks=users[info.digest],
                layers=info.layers,
            )
            for info in infos
        ]
        layers = [
            LayerUse(info.chain, self._images.layers.is_held(info.chain))
            for info in self._images.layers.all()
        ]
        images = decide_images(uses, replace(self._limits, free=free), time.time())
        found = {("image", digest): decision for digest, decision in images.items()}
        of_layers = decide_layers(layers, uses, images)
        return found | {("layer", chain): decision for chain, decision in of_layers.items()}

    async def collect(self) -> list[str]:
        """Remove unused images and layers; return a description of each."""
        async with self._collecting:
            done = []
            for (kind, name), decision in (await self._removable()).items():
                if kind == "image" and await self._try_remove(name, self._delete_image):
                    done.append(f"image {name} is removed: {decision.why}")
                    crash_point("gc.image-deleted")
            # Decided again: layers of the removed images are removed in the same round, but not
            # layers of an image that began to arrive meanwhile.
            for (kind, name), decision in (await self._removable()).items():
                if kind == "layer" and await self._try_remove(name, self._images.layers.discard):
                    done.append(f"layer {name} is removed: {decision.why}")
                    crash_point("gc.layer-deleted")
        for line in done:
            log.info("%s", line)
        return done

    async def _delete_image(self, digest: str) -> bool:
        try:
            await self._images.delete(digest, self._tasks.tasks_using)
        except (Conflict, NotFound):  # another request was faster
            return False
        return True

    async def _try_remove(self, name: str, remove: Callable[[str], Awaitable[bool]]) -> bool:
        """Return whether an object was removed; an error of one does not keep the others."""
        try:
            return await remove(name)
        except (TwineError, OSError) as e:
            log.warning("cannot remove an unused object", extra={"object": name, "why": str(e)})
            return False

    async def _removable(self) -> dict[tuple[str, str], RetentionDecision]:
        decisions = await self._lanes.run("btrfs", self._decisions)
        return {key: decision for key, decision in decisions.items() if not decision.stays}

    async def repair(self) -> Accounts:
        """Repair errors; return a description of each repair, and the remaining errors."""
        done = []
        for account in await self.inspect():
            if account.wrong:
                try:
                    if await self._repair(account):
                        done.append(f"{account.kind} {account.name} is removed: {account.why}")
                except (TwineError, OSError) as e:
                    log.warning("cannot repair", extra={"object": account.name, "why": str(e)})
        left = [account for account in await self.inspect() if account.wrong]
        return Accounts(accounts=left, done=done)

    async def _repair(self, account: Account) -> bool:
        """Remove an object without an owner; return False if only a person can repair it."""
        state, name = self._state, account.name
        match account.kind:
            case "unit":
                await self._units.clear(name, timeout_s=30.0)
            case "root":
                await self._storage.remove_root(name)
            case "scratch":
                await self._lanes.run("btrfs", self._machine.btrfs.delete, state / "scratch" / name)
            case "namespace":
                await self._networks.clear(namespace=name)
            case "veth":
                await self._networks.clear(veth=name)
            case "image" | "layer" | "staging":
                return await self._images.tidy_if_idle()
            case "record" if name.startswith(".") and name.endswith(".new"):
                await self._lanes.run("journal", (state / "journal" / name).unlink)
            case _:
                return False
        return True

    async def watch(self) -> None:
        """Collect garbage periodically until cancelled."""
        while True:
            await asyncio.sleep(COLLECT_S)
            try:
                await self.collect()
            except (TwineError, OSError) as e:
                log.warning("cannot remove unused objects", extra={"why": str(e)})


class ImageAges:
    """The ages of images count only the time in which the host was up.

    A clock that is set from a wrong date to the right one must not make every image old. Blocking:
    call it through a lane.
    """

    def __init__(self, state: Path, boottime_s: Callable[[], float]) -> None:
        """`state` has the folder of the images, and the file with the last readings of both clocks.

        `boottime_s` returns the seconds since boot.
        """
        self._folder, self._file = state / "images", state / "clock"
        self._boottime_s = boottime_s

    def update(self, in_use: Collection[str]) -> None:
        """Record the use of these images; for the others, undo steps of the wall clock.

        On a disk that cannot be written the ages stay, and no image can be removed either.
        """
        now, boot_s = time.time(), self._boottime_s()
        step_s = self._step_s(now, boot_s)
        for path in self._folder.glob("*.json"):
            with suppress(OSError):  # the image is being deleted, or the disk is read-only
                was = path.stat().st_mtime
                used = now if f"sha256:{path.stem}" in in_use else min(was + step_s, now)
                if used != was:
                    os.utime(path, (used, used))
        with suppress(OSError):  # the next call finds the same step: the times never exceed now
            self._file.write_text(f"{now!r} {boot_s!r}\n")

    def _step_s(self, now: float, boot_s: float) -> float:
        """Return by how much the wall clock gained since the last call, 0 if by little or nothing.

        After a reboot this includes the time for which the host was off.
        """
        try:
            wall, boot = map(float, self._file.read_text().split())
        except (OSError, ValueError):
            return 0.0
        gained_s = now - wall - (boot_s - boot if boot_s >= boot else boot_s)
        return gained_s if gained_s > STEP_S else 0.0


def _is_read_only(btrfs: Btrfs, path: Path) -> bool:
    found = btrfs.find(path)
    return found is None or found.read_only
