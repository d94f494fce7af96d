"""The SQLite engine behaves like a dictionary under any writes and restarts."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.store import Compacted, Delete, KeyChange, Operation, Put, Store
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore
from wire.errors import Conflict

KEYS = st.sampled_from(["a", "a/1", "a/2", "b/1", "b/ü"])
OPERATIONS = st.lists(
    st.builds(Put, KEYS, st.binary(max_size=4)) | st.builds(Delete, KEYS),
    max_size=4,
    unique_by=lambda operation: operation.key,
)


class TwoStores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.model: Store = MemoryStore(history=20)
        self.real: Store = SqliteStore(Path(self.folder.name), history=20)
        self.run(self.model.__aenter__())
        self.run(self.real.__aenter__())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def both(self, call) -> None:
        outcomes = []
        for store in (self.model, self.real):
            try:
                outcomes.append(self.run(call(store)))
            except (Conflict, Compacted) as e:
                outcomes.append((type(e), str(e)))
        assert outcomes[0] == outcomes[1]

    @rule(compare=st.dictionaries(KEYS, st.integers(0, 6), max_size=2), operations=OPERATIONS)
    def write(self, compare: dict[str, int], operations: list[Operation]) -> None:
        self.both(lambda s: s.txn(compare, operations))

    @rule(operations=OPERATIONS, key=KEYS)
    def update(self, operations: list[Operation], key: str) -> None:
        entry = self.run(self.model.get(key))
        compare = {key: entry.revision if entry else 0}
        self.both(lambda s: s.txn(compare, operations))

    @rule(prefix=st.sampled_from(["", "a", "a/", "b/"]))
    def read(self, prefix: str) -> None:
        self.both(lambda s: s.list_prefix(prefix))

    @rule(back=st.integers(0, 8))
    def watch(self, back: int) -> None:
        revision = self.run(self.model.list_prefix("")).revision
        if back == 0 or revision < back or revision - back < self.started_at:
            return

        async def tail(store: Store) -> list[KeyChange]:
            found = []
            async for change in store.watch("", revision - back):
                found.append(change)
                if change.revision == revision:
                    break
            return found

        self.both(tail)

    started_at = 0

    @rule()
    def restart(self) -> None:
        for store in (self.model, self.real):
            self.run(store.__aexit__(None, None, None))
            self.run(store.__aenter__())
        self.started_at = self.run(self.model.list_prefix("")).revision

    @invariant()
    def epochs_agree(self) -> None:
        assert self.model.epoch() == self.real.epoch()

    def teardown(self) -> None:
        for store in (self.model, self.real):
            self.run(store.__aexit__(None, None, None))
        self.runner.close()
        self.folder.cleanup()


TwoStores.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_sqlite_agrees_with_its_model = TwoStores.TestCase
