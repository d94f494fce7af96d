"""Layers of OCI images: each is a read-only subvolume, a snapshot of the layer below with changes.

    staging/<image>.tree    the subvolume to which the layers of an image are applied
    layers/<chain>/         the read-only snapshot of it after this layer
    layers/<chain>.json     written last: the layer is complete

Images on the same base share its layers. Data that layers share is on disk once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from agent.images.core.oci import Layer
from agent.images.core.unpack import UNPACK_TIMEOUT_S, layer_properties
from agent.images.published import IMAGE_FILES, Published, digits_of
from agent.images.sandbox import Sandbox
from agent.machine import Btrfs
from agent.runtime.crashpoints import crash_point
from agent.runtime.offload import Lanes
from wire.errors import Unprocessable

Hold = Callable[[Iterable[str]], None]
"""Keeps the layers of these chains, present or future, for the image that is being received."""


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A complete layer."""

    chain: str
    below: str
    diff_id: str
    blob: str
    """Digest of the compressed layer."""
    blob_bytes: int
    created_at: float


class Layers:
    """The layers on this machine."""

    def __init__(self, state: Path, btrfs: Btrfs, sandbox: Sandbox, lanes: Lanes) -> None:
        """Keep layers below `state`, a folder on btrfs."""
        self.published = Published(btrfs, state / "layers", LayerInfo)
        self._btrfs = btrfs
        self._sandbox = sandbox
        self._lanes = lanes
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._fetching: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By the chain below and the compressed layer: one image at a time fetches it."""
        self._held: Counter[str] = Counter()
        """Chain ids that an image in transfer needs: they must not be removed."""
        self._removing = asyncio.Lock()
        """Held while a layer is removed, or the present layers are read and held."""

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yield a function that keeps layers, present or future, from removal until the exit.

        A pull holds the present layers before it fetches the rest, and releases them once the
        image refers to them. Until then no image keeps them.
        """
        held_chains: list[str] = []

        def hold(chains: Iterable[str]) -> None:
            more = list(chains)
            self._held.update(more)
            held_chains.extend(more)

        try:
            yield hold
        finally:
            self._held -= Counter(held_chains)

    def is_held(self, chain: str) -> bool:
        """Return whether an image in transfer needs this layer."""
        return self._held[chain] > 0

    def all(self) -> list[LayerInfo]:
        """Return all layers, the oldest first."""
        return sorted(self.published.all(), key=lambda f: (f.created_at, f.chain))

    def present_chains(self, blobs: Iterable[str]) -> list[str]:
        """Return the chains of an image's compressed layers that the host has, from the lowest."""
        chains = {(info.below, info.blob): info.chain for info in self.all()}
        below, found = "", []
        for blob in blobs:
            if (chain := chains.get((below, blob))) is None:
                break
            found.append(chain)
            below = chain
        return found

    @asynccontextmanager
    async def fetch_turn(
        self, blobs: Sequence[str], on_wait: Callable[[int], None], hold: Hold
    ) -> AsyncIterator[list[str]]:
        """Wait until no other image fetches the lowest missing layer of this image.

        Yields the chains that the host has then; `hold` has kept them. If several images on one
        base are pulled at once, only the first pull fetches it (docs/adr/0124). `on_wait` is called
        with the number of the layer for which this pull waits.
        """
        while len(present := await self._hold_present(blobs, hold)) < len(blobs):
            missing = (present[-1] if present else "", blobs[len(present)])
            lock = self._fetching.setdefault(missing, asyncio.Lock())
            if lock.locked():
                on_wait(len(present) + 1)
            async with lock:
                if await self._hold_present(blobs, hold) == present:
                    yield present
                    return
        yield present

    async def _hold_present(self, blobs: Sequence[str], hold: Hold) -> list[str]:
        async with self._removing:
            present = await self._lanes.run(IMAGE_FILES, self.present_chains, blobs)
            hold(present)
        return present

    async def apply_missing(
        self, layers: Sequence[Layer], layout: Path, tree: Path, report: Callable[[int], None]
    ) -> None:
        """Make all layers of an image, and make `tree` equal to the topmost one.

        `layout` has the blobs of missing layers. They are applied to the tree in order, and each
        layer is a snapshot of the tree. A blob is removed once it was applied: data that is
        removed before a flush is never written. `report` is called with the number of each layer.
        """
        at: str | None = None
        applying: _LayerProcess | None = None
        try:
            for number, layer in enumerate(layers, start=1):
                async with self._locks.setdefault(layer.chain, asyncio.Lock()):
                    if await self._is_complete(layer.chain):
                        continue
                    if applying is None or at != layer.below:
                        if applying is not None:
                            await applying.close()
                        await self._lanes.run("btrfs", self._start_tree, layer.below, tree)
                        applying = _LayerProcess(self._sandbox, layers[number - 1 :], layout, tree)
                    crash_point("pull.layer-begun")
                    await applying.next()
                    crash_point("pull.layer-applied")
                    if all(other.blob.digest != layer.blob.digest for other in layers[number:]):
                        await self._lanes.run("files", (layout / layer.blob.path).unlink)
                    await self._lanes.run("btrfs", self._publish, layer, tree)
                    crash_point("pull.layer-published")
                at = layer.chain
                report(number)
        finally:
            if applying is not None:
                await applying.close()
        if at != layers[-1].chain:
            await self._lanes.run("btrfs", self._start_tree, layers[-1].chain, tree)

    async def _is_complete(self, chain: str) -> bool:
        return await self._lanes.run(IMAGE_FILES, self.published.find, chain) is not None

    def _start_tree(self, below: str, tree: Path) -> None:
        self._btrfs.delete(tree)
        if below:
            self._btrfs.snapshot(self.published.path(below), tree)
        else:
            self._btrfs.create(tree)
            os.chmod(tree, 0o755)

    def _publish(self, layer: Layer, tree: Path) -> None:
        """Make a layer from the tree; afterwards the snapshot and its files are on disk.

        The kernel flushes only this tree before it makes the snapshot, and commits the snapshot
        before the call returns (`btrfs_mksnapshot`, fs/btrfs/ioctl.c).
        """
        final = self.published.path(layer.chain)
        self._btrfs.delete(final)  # a leftover of a removal that failed half-way
        self._btrfs.snapshot(tree, final, read_only=True)
        crash_point("pull.layer-moved")
        info = LayerInfo(
            chain=layer.chain,
            below=layer.below,
            diff_id=layer.diff_id,
            blob=layer.blob.digest,
            blob_bytes=layer.blob.size,
            created_at=time.time(),
        )
        self.published.declare(layer.chain, info)

    async def discard(self, chain: str) -> bool:
        """Remove a layer unless an image in transfer needs it; its snapshots stay complete."""
        lock = self._locks.setdefault(chain, asyncio.Lock())
        async with lock:
            async with self._removing:
                if self.is_held(chain):
                    return False
                description = self.published.description(chain)
                await self._lanes.run(IMAGE_FILES, description.unlink, missing_ok=True)
            crash_point("gc.layer-undeclared")
            await self._lanes.run("btrfs", self._btrfs.delete, self.published.path(chain))
        return True


class _LayerProcess:
    """One process that applies layers to a tree, in order, and waits for a request before each."""

    def __init__(self, sandbox: Sandbox, layers: Sequence[Layer], layout: Path, tree: Path) -> None:
        """Start the process; it applies the first layer at once."""
        self._layers, self._number = layers, 0
        self._pipes = [tree.with_name(f"{tree.name}.{name}") for name in ("in", "out")]
        self._ends: list[int] = []
        for path in self._pipes:
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            # Opened for reading and writing, so that opening does not wait for the other side.
            # Closing it gives the process an end of file.
            self._ends.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        self._applied = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ends[1], self._read_reports)
        names = str(self._pipes[0]), str(self._pipes[1])
        properties = layer_properties(sys.executable, str(layout), layers, str(tree), names)
        unit = f"twine-unpack-{digits_of(layers[0].chain)[:12]}.service"
        longest_s = UNPACK_TIMEOUT_S * len(layers)
        self._running = asyncio.ensure_future(
            sandbox.run(unit, properties, self._refusal, timeout_s=longest_s)
        )

    def _refusal(self) -> str:
        return f"layer {self._layers[max(self._number - 1, 0)].blob.digest} is refused"

    def _read_reports(self) -> None:
        for _ in range(os.read(self._ends[1], 4096).count(b"\n")):
            self._applied.release()

    async def next(self) -> None:
        """Apply the next layer and return when it is done. Raises the reason of a failure."""
        self._number += 1
        if self._number > 1:
            os.write(self._ends[0], b"next\n")
        applied = asyncio.ensure_future(self._applied.acquire())
        try:
            await asyncio.wait({applied, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not applied.done():
                await self._running
                await asyncio.sleep(0)  # its last report may still be unread
            if not applied.done():
                raise Unprocessable(f"{self._refusal()}: its program ended before it")
        finally:
            applied.cancel()

    async def close(self) -> None:
        """Cancel the program if layers are left, wait for its end, and remove its pipes."""
        if self._number < len(self._layers):
            self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._loop.remove_reader(self._ends[1])
        for end, path in zip(self._ends, self._pipes, strict=True):
            os.close(end)
            path.unlink(missing_ok=True)
