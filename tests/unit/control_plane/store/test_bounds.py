"""The limits that every engine accepts: values and transactions of bounded size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.store import Delete, Operation, Put
from control_plane.store.bounds import ROWS_MAX, VALUE_MAX, Bounds
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore

TOO_MANY: list[Operation] = [Put(f"machines/{n}", b"") for n in range(ROWS_MAX + 1)]
TOO_LARGE: list[Operation] = [Delete("a"), Put("jobs/web", b"x" * (VALUE_MAX + 1))]


async def test_a_strict_store_refuses_what_not_every_engine_takes() -> None:
    async with MemoryStore(strict=True) as store:
        with pytest.raises(ValueError, match="101 operations; the maximum is 100 at machines/0"):
            await store.txn({}, TOO_MANY)
        with pytest.raises(ValueError, match="a value of 262145 bytes at jobs/web"):
            await store.txn({}, TOO_LARGE)
        assert (await store.list_prefix("")).entries == ()


async def test_a_production_store_creates_it_and_counts_its_creators(tmp_path) -> None:
    async with SqliteStore(tmp_path) as store:
        for operations in (TOO_MANY, TOO_LARGE, TOO_LARGE):
            await store.txn({}, operations)
        assert store.bounds.offenders == {"machines": 1, "jobs": 2}
        assert len((await store.list_prefix("")).entries) == ROWS_MAX + 2


@given(st.integers(0, 300), st.integers(0, 2 * VALUE_MAX))
def test_a_change_within_the_bounds_is_never_refused(rows: int, size: int) -> None:
    operations = [Put(f"k{n}", b"x" * size if n == 0 else b"") for n in range(rows)]
    over = rows > ROWS_MAX or (rows > 0 and size > VALUE_MAX)
    counted = Bounds(strict=False)
    counted.check(operations)
    assert bool(counted.offenders) is over
