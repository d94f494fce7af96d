"""The second phase of allocations: sends each decision to the brokers until all acknowledge it.

A decision is durable and will be carried out, so its caller does not wait for a broker whose store
fails. After a second the work continues in the background. The same holds for the rollback of an
abandoned allocation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from control_plane.agents.ports import KnownMachines
from control_plane.allocator.turns import finish_or_cancel
from control_plane.broker.holds import Take
from control_plane.runtime.runtime import Runtime
from wire.errors import Busy

log = logging.getLogger(__name__)
PREPARE_S = 5.0
"""A broker that has not answered by then fails the allocation as busy."""
WAIT_S = 1.0
"""How long the caller waits for the second phase, which usually takes a few milliseconds."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class Commits:
    """The second phases under way, by transaction."""

    def __init__(self, participants: KnownMachines, runtime: Runtime) -> None:
        self._participants, self._runtime = participants, runtime
        self._work: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Return how many transactions some broker has not acknowledged yet."""
        return len(self._work)

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all machines, or raise; `Busy` if a broker does not answer in time."""
        try:
            async with asyncio.timeout(PREPARE_S):
                await self._participants.prepare(transaction, takes)
        except TimeoutError as e:
            raise Busy(
                f"cannot take {len(takes)} machines: a broker did not answer in {PREPARE_S:g} s",
                hint="it is retried without the machines of that data center",
            ) from e

    async def commit(self, transaction: str, then: Callable[[], None]) -> None:
        """Let all brokers assign the held machines; call `then` once they have."""

        async def work() -> None:
            await self._until_acknowledged(transaction, "assignment", self._participants.commit)
            then()

        await self._track(transaction, work)

    async def abort(self, transaction: str) -> None:
        """Let all brokers release the machines that they may hold."""
        what, abort = "release of holds", self._participants.abort
        await self._track(transaction, lambda: self._until_acknowledged(transaction, what, abort))

    async def close(self) -> None:
        """Wait for running work for a moment; the next start finishes the rest."""
        await finish_or_cancel(list(self._work.values()))

    async def _track(self, transaction: str, work: Callable[[], Awaitable[None]]) -> None:
        async def tracked() -> None:
            try:
                await work()
            finally:
                self._work.pop(transaction, None)

        task = self._runtime.spawn("allocation ends", tracked())
        self._work[transaction] = task
        await asyncio.wait([task], timeout=WAIT_S)

    async def _until_acknowledged(
        self, transaction: str, what: str, send: Callable[[str], Awaitable[object]]
    ) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await send(transaction)
            except Exception as e:  # the decision is durable: it is sent again after any error
                fields = {"transaction": transaction, "what": what, "reason": str(e)}
                log.warning("a broker did not store a decision", extra=fields)
                await self._runtime.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return
