"""The release of a restored store survives a lost answer of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from virtual_time import RUNTIME, run

from control_plane.agents.observations import Observations
from control_plane.agents.region import Region
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.api.restored import Restored
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.restored import RestoredStore
from control_plane.store import Operation, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import RESTORED, encode
from wire.errors import Conflict, UnknownOutcome


class ForgetfulStore:
    """A store that makes the next write, or not, and does not answer."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.loses: list[bool] = []
        """For each of the next writes: whether it is made."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        if not self.loses:
            return await self._inner.txn(compare, operations)
        if self.loses.pop(0):
            await self._inner.txn(compare, operations)
        raise UnknownOutcome("the answer was lost")


@pytest.mark.behaviour("BUG-CP146")
@pytest.mark.parametrize("is_made", [True, False])
def test_a_release_whose_answer_was_lost_can_be_repeated(is_made: bool):
    async def main() -> None:
        async with MemoryStore() as inner:
            await inner.txn({}, [Put(RESTORED, encode(Restored(epoch=3, at=1.0, copied_at=0.0)))])
            store = ForgetfulStore(inner)
            brokers = Brokers(inner, RUNTIME)
            region = Region(brokers, Observations(brokers, RUNTIME), SchedulerSettings(), RUNTIME)
            restored = RestoredStore(store, region, JobTable(inner), TaskDirectory())
            begun: list[str] = []
            restored.begin = lambda: begun.append("begun")
            await restored.load()
            store.loses = [is_made]
            with pytest.raises(UnknownOutcome):
                await restored.release("alice")
            assert restored.needs_release
            assert begun == []
            released = await restored.release("bob")
            assert released.released_by == ("alice" if is_made else "bob")
            assert begun == ["begun"]
            assert not restored.needs_release
            with pytest.raises(Conflict):
                await restored.release("bob")
            assert begun == ["begun"]

    run(main())
