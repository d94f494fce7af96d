"""An entitlement is not deleted while a job is being applied to it."""

import asyncio

import pytest
from world import a_job, scenario

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord
from control_plane.portal.portal import Portal, Use
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import USES
from wire.errors import Conflict, TwineError


@pytest.mark.behaviour("BUG-CP8")
@scenario()
async def test_a_job_that_comes_while_its_entitlement_is_deleted_is_never_left_without_one(w):
    """In 9 of 12 attempts the job existed, and its entitlement did not."""
    await w.set_up()
    outcomes = set()
    for turns in range(12):
        name = f"e{turns}"
        await w.cp.capacity.put_entitlement(name, EntitlementSpec(machines=0, host_profile="web"))
        deletes = asyncio.ensure_future(w.cp.capacity.delete_entitlement(name))
        for _ in range(turns):
            await asyncio.sleep(0)
        applies = asyncio.ensure_future(
            w.cp.apply_job(a_job(0, name=f"j{turns}", entitlement=name))
        )
        ends = await asyncio.gather(deletes, applies, return_exceptions=True)
        assert all(end is None or isinstance(end, TwineError | JobRecord) for end in ends)
        is_there = w.cp._portal.table.find(name) is not None
        has_job = f"j{turns}" in w.cp._jobs
        assert is_there or not has_job
        outcomes.add((is_there, has_job))
    assert outcomes >= {(False, False)}


@pytest.mark.behaviour("BUG-CP8")
async def test_a_deletion_fails_if_another_process_wrote_a_job_meanwhile():
    """The deletion also compares the absence of jobs in the store."""
    async with MemoryStore() as store:
        portal = Portal(store, Runtime())
        await portal.put("front", EntitlementSpec(machines=0, host_profile="web"), jobs=[])

        def no_jobs(_: str) -> list[str]:
            return []

        portal.jobs_of = no_jobs
        real = store.txn

        async def txn(compare, operations):
            store.txn = real
            await real({}, [Put(USES + "front", b"{}")])
            return await real(compare, operations)

        store.txn = txn
        with pytest.raises(Conflict):
            await portal.delete("front", Use())
        assert "front" in portal.table


@pytest.mark.behaviour("BUG-CP8")
async def test_no_job_is_applied_to_an_entitlement_being_deleted():
    """The later of the two requests is refused."""
    async with MemoryStore() as store:
        portal = Portal(store, Runtime())
        await portal.put("front", EntitlementSpec(machines=0, host_profile="web"), jobs=[])
        with portal.applying("front"), pytest.raises(Conflict, match="a job is being moved to it"):
            await portal.delete("front", Use())
        await portal.delete("front", Use())
