"""How jobs are stored: in small values, one chunk per change; the old form is split."""

import msgspec
import pytest
from faulty_store import LOST, MADE, UNANSWERED, FaultyStore, Outcome
from msgspec.structs import replace

from agent.api import Health, TaskState
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord, task_id
from control_plane.api.stored_jobs import CHUNK
from control_plane.runtime.job_table import JobTable
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, Conflict

VALUE_MAX, ROWS_MAX = 256 << 10, 100
SPEC = JobSpec(name="web", entitlement="front", tasks=3, image="sha256:" + "1" * 64, command=["/x"])


def a_task(index: int, **changes) -> TaskRecord:
    values = {
        "version": 1,
        "generation": index + 1,
        "phase": TaskPhase.RUNNING,
        "placement": Placement(machine=f"m{index % 7}", ports={"http": 20_000 + index % 99}),
        "listed": True,
        "since": 1_800_000_000.25,
    }
    return TaskRecord(index=index, **(values | changes))


def a_record(tasks: int = 3, **changes) -> JobRecord:
    values = {
        "spec": replace(SPEC, tasks=tasks),
        "version": 1,
        "specs": {1: SPEC},
        "tasks": [a_task(i) for i in range(tasks)],
        "created_at": 1_800_000_000.5,
        "generation": tasks,
    }
    return JobRecord(name="web", **(values | changes))


class Watched(MemoryStore):
    """Records what each transaction wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[dict[str, bytes | None]] = []
        self.is_broken = False

    async def txn(self, compare, operations) -> int:
        if self.is_broken:
            raise OSError("no space left on device")
        revision = await super().txn(compare, operations)
        written = {o.key: o.value if isinstance(o, Put) else None for o in operations}
        self.writes.append({k: v for k, v in written.items() if not k.startswith("outcomes/")})
        return revision


async def stored(store: MemoryStore) -> JobRecord:
    table = JobTable(store)
    await table.load()
    return table.get("web")


@pytest.mark.behaviour("BUG-CP22")
async def test_a_change_of_health_writes_nothing() -> None:
    async with Watched() as store:
        table = JobTable(store)
        changed: list[str] = []
        table.listen(lambda name, *_: changed.append(name))
        record = a_record(600)
        await table.commit("web", record)
        store.writes.clear()
        changed.clear()
        sick = replace(record.tasks[3], health=Health.UNHEALTHY, state=TaskState.RUNNING)
        tasks = [*record.tasks[:3], replace(sick, restarts=4), *record.tasks[4:]]
        await table.commit("web", replace(record, tasks=tasks))
        assert (store.writes, changed) == ([], [])
        assert table.get("web").tasks == tasks
        assert (await stored(store)).tasks[3] == record.tasks[3]


@pytest.mark.behaviour("BUG-CP22")
async def test_a_change_of_one_task_writes_its_chunk_only() -> None:
    async with Watched() as store:
        table = JobTable(store)
        record = a_record(15_000)
        await table.commit("web", record)
        unlisted = replace(record.tasks[300], listed=False)
        tasks = [*record.tasks[:300], unlisted, *record.tasks[301:]]
        await table.commit("web", replace(record, tasks=tasks))
        assert list(store.writes[-1]) == ["tasks/web/001"]
        assert await stored(store) == replace(record, tasks=tasks)


@pytest.mark.behaviour("BUG-CP22")
async def test_the_largest_job_fits_the_bounds_of_a_distributed_store() -> None:
    """The job has 15,000 tasks of the largest allowed size."""
    name = "n" * 63
    ports = {f"{i:02}" + "p" * 61: 20_000 + i for i in range(16)}
    widest = Placement(machine=name, ports=ports)
    tasks = [
        a_task(i, placement=widest, avoid=name, generation=10**12, attempts=10**6)
        for i in range(15_000)
    ]
    left = sorted(task_id("web", i) for i in range(15_000))
    async with Watched() as store:
        table = JobTable(store)
        record = a_record(tasks=0, leaving={name: left})
        await table.commit("web", replace(record, tasks=tasks))
        assert len(store.writes[-1]) <= ROWS_MAX
        assert max(len(value or b"") for value in store.writes[-1].values()) <= VALUE_MAX
        assert await stored(store) == replace(record, tasks=tasks)


async def test_a_deleted_job_leaves_no_chunk() -> None:
    async with Watched() as store:
        table = JobTable(store)
        record = a_record(2 * CHUNK + 1)
        await table.commit("web", record)
        await table.commit("web", replace(record, tasks=record.tasks[:CHUNK]))
        assert (await stored(store)).tasks == record.tasks[:CHUNK]
        await table.commit("web", None)
        left = [entry.key for entry in (await store.list_prefix("")).entries]
        assert [key for key in left if not key.startswith("outcomes/")] == []


async def test_a_revision_never_goes_back_even_where_chunks_go() -> None:
    async with Watched() as store:
        table = JobTable(store)
        record = a_record(CHUNK + 1)
        await table.commit("web", record)
        await table.commit("web", replace(record, tasks=record.tasks[:CHUNK]))
        revision = table.revision("web")
        again = JobTable(store)
        await again.load()
        assert again.revision("web") == revision


async def test_another_writer_is_detected_and_its_writes_are_read() -> None:
    async with Watched() as store:
        mine, other = JobTable(store), JobTable(store)
        record = a_record(3)
        await mine.commit("web", record)
        await other.load()
        tasks = [replace(record.tasks[0], listed=False), *record.tasks[1:]]
        await other.commit("web", replace(record, tasks=tasks))
        with pytest.raises(Conflict):
            await mine.commit("web", replace(record, tasks=record.tasks[:2]))
        assert mine.get("web").tasks == tasks
        await mine.commit("web", replace(record, tasks=tasks[:2]))
        assert (await stored(store)).tasks == tasks[:2]


def of_schema_1(record: JobRecord) -> Put:
    raw = msgspec.to_builtins(record) | {"schema": 1}
    for task in raw["tasks"]:
        task |= {"health": "healthy", "state": "running", "restarts": 2, "retry_at": 1.8e9}
    return Put("jobs/web", msgspec.json.encode(raw))


async def test_a_record_of_the_release_before_is_split_once() -> None:
    async with Watched() as store:
        record = a_record(600, leaving={"m1": ["web-300", "web-7"]})
        await store.txn({}, [of_schema_1(record)])
        assert await stored(store) == record
        assert sorted(store.writes[-1]) == ["jobs/web", *(f"tasks/web/00{i}" for i in range(3))]
        written = len(store.writes)
        assert await stored(store) == record
        assert len(store.writes) == written


@pytest.mark.parametrize("outcome", [UNANSWERED, LOST])
async def test_a_split_whose_answer_is_lost_is_read_back(outcome: Outcome) -> None:
    """A start failed, or continued with guessed revisions."""
    async with MemoryStore() as inner:
        record = a_record(300)
        await inner.txn({}, [of_schema_1(record)])
        outcomes = [outcome]
        store = FaultyStore(inner, lambda _: outcomes.pop() if outcomes else MADE)
        table = JobTable(store)
        if outcome is UNANSWERED:
            await table.load()
            assert table.get("web") == record
            await table.update("web", lambda r: replace(r, generation=1_000))  # no conflict
        else:
            with pytest.raises(Busy, match="nothing was changed"):
                await table.load()
        again = await stored(inner)
        assert again.tasks == record.tasks


async def test_a_split_that_fails_leaves_the_old_record_whole() -> None:
    async with Watched() as store:
        record = a_record(600)
        await store.txn({}, [of_schema_1(record)])
        before = (await store.list_prefix("")).entries
        store.is_broken = True
        with pytest.raises(OSError, match="no space"):
            await stored(store)
        assert (await store.list_prefix("")).entries == before
        store.is_broken = False
        assert await stored(store) == record
