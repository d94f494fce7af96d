"""For a write whose answer was lost, the reported outcome is true and stays true."""

import asyncio
from collections.abc import Sequence

import pytest
from faulty_store import LOST, MADE, REFUSED, UNANSWERED, FaultyStore, Outcome
from hypothesis import given
from hypothesis import strategies as st

from control_plane.store import Delete, Operation, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.outcomes import OUTCOMES, Slots, WriteAttempt
from wire.errors import Busy, Conflict, UnknownOutcome

outcomes = st.lists(
    st.sampled_from((MADE, REFUSED, LOST, UNANSWERED)) | st.builds(Outcome, late=st.integers(1, 4)),
    max_size=25,
)
steps = st.lists(st.sampled_from(("put", "same", "delete", "two")), min_size=1, max_size=6)


async def known(attempt: WriteAttempt) -> int:
    """Ask until the store knows the outcome."""
    while True:
        try:
            return await attempt.outcome()
        except (UnknownOutcome, Busy):
            await asyncio.sleep(0)


async def lane(slots: Slots, name: str, wanted: Sequence[str], model: dict[str, bytes]) -> None:
    """Write one's own keys, step by step; `model` holds the values reported as written."""
    at = {f"{name}/a": 0, f"{name}/b": 0}
    first, second = at
    for number, step in enumerate(wanted):
        value = b"same" if step == "same" else b"%d" % number
        operations: list[Operation] = [Put(first, value)]
        if step == "delete":
            operations = [Delete(first)]
        if step == "two":
            operations.append(Put(second, value))
        keys = [operation.key for operation in operations]
        attempt = WriteAttempt(slots, {key: at[key] for key in keys}, operations)
        try:
            revision = await attempt.make()
        except Busy:
            revision = 0
        except UnknownOutcome:
            revision = await known(attempt)
        if not revision:
            for key in keys:  # the query may have raised an entry's revision
                entry = await slots.store.get(key)
                at[key] = entry.revision if entry else 0
            continue
        for operation in operations:
            if isinstance(operation, Put):
                model[operation.key], at[operation.key] = operation.value, revision
            else:
                model.pop(operation.key, None)
                at[operation.key] = 0


@pytest.mark.behaviour("F-47", "BUG-CP14")
@given(outcomes, st.lists(steps, min_size=1, max_size=3))
def test_a_report_on_a_lost_write_stays_true(outcomes, lanes) -> None:
    """The store holds exactly the reported values for made, refused, lost, unanswered and late
    writes.
    """

    async def main() -> None:
        left = iter(outcomes)
        async with FaultyStore(MemoryStore(), lambda _: next(left, MADE)) as store:
            model: dict[str, bytes] = {}
            slots = Slots(store, "test")
            await asyncio.gather(
                *(lane(slots, f"l{n}", wanted, model) for n, wanted in enumerate(lanes))
            )
            for _ in range(6):
                await store.get("")  # late writes arrive
            entries = (await store.list_prefix("")).entries
            found = {e.key: e.value for e in entries if not e.key.startswith(OUTCOMES)}
            assert found == model
            assert len(entries) - len(found) <= len(lanes)  # slots are reused

    asyncio.run(main())


@pytest.mark.behaviour("BUG-CP14")
async def test_a_write_that_comes_after_the_question_is_refused() -> None:
    """A write that was not visible yet was reported as failed, and then it arrived."""
    async with FaultyStore(MemoryStore(), lambda _: MADE) as store:
        slots = Slots(store, "test")
        store.outcome = lambda operations: Outcome(late=5) if operations[0].key == "a" else MADE
        attempt = WriteAttempt(slots, {"a": 0}, [Put("a", b"1")])
        with pytest.raises(UnknownOutcome):
            await attempt.make()
        assert await store.get("a") is None
        assert await attempt.outcome() == 0
        for _ in range(5):
            assert await store.get("a") is None
        with pytest.raises(UnknownOutcome):
            await (attempt := WriteAttempt(slots, {"a": 0}, [Put("a", b"2")])).make()
        for _ in range(3):
            await store.get("")
        assert await attempt.outcome() > 0
        assert (await store.inner.get("a")).value == b"2"


async def test_a_refused_attempt_leaves_its_slot_to_the_next() -> None:
    async with MemoryStore() as store:
        slots = Slots(store, "test")
        await WriteAttempt(slots, {"a": 0}, [Put("a", b"")]).make()
        for _ in range(3):
            with pytest.raises(Conflict):
                await WriteAttempt(slots, {"a": 0}, [Put("a", b"")]).make()
            await WriteAttempt(slots, {"b": 0}, [Put("b", b""), Put("c", b"")]).make()
            await store.txn({}, [Delete("b")])
        assert len((await store.list_prefix(OUTCOMES)).entries) == 1
        attempt = WriteAttempt(slots, {}, [Put("d", b"")])
        assert await attempt.outcome() == 0  # it was never sent
