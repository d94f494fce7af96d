"""Long answers are decoded in parts, to the same values as at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from control_plane.api.jobs import JobRecord, Jobs, JobSpec, JobStatus, TaskRecord
from control_plane.api.machines import Machines
from control_plane.scheduler.core.rollout import summarize
from wire import decoding
from wire.client import WireClient
from wire.decoding import decode_in_parts
from wire.errors import ProtocolError
from wire.routes import Route

pytestmark = pytest.mark.behaviour("BUG-CP130")

LIST_JOBS = Route("list_jobs", "GET", "/v1/jobs", response=Jobs)


def status(name: str, tasks: int) -> JobStatus:
    spec = JobSpec(
        name=name, entitlement="web", tasks=tasks, image=f"sha256:{'a' * 64}", command=["/x"]
    )
    found = [TaskRecord(index=index, version=1, generation=1) for index in range(tasks)]
    record = JobRecord(name=name, spec=spec, version=1, specs={1: spec}, tasks=found)
    return summarize(record, "")


@pytest.fixture
def jobs() -> Jobs:
    """Many small jobs, and one that is long by itself."""
    return Jobs(jobs=[*(status(f"job{n}", 2) for n in range(400)), status("large", 6_000)])


class Answering(WireClient):
    """A client whose server answers with these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__("unix:/run/nothing.sock")
        self._data = data

    def _open(self, *_: object) -> Any:
        async def chunks() -> AsyncIterator[bytes]:
            yield self._data

        @asynccontextmanager
        async def request(*_: object, **__: object) -> AsyncIterator[Any]:
            content = SimpleNamespace(iter_any=chunks)
            yield SimpleNamespace(status=200, headers={}, content=content)

        return SimpleNamespace(request=request)


async def test_other_tasks_of_the_loop_run_while_a_long_answer_is_decoded(jobs: Jobs) -> None:
    data = msgspec.json.encode(jobs)
    assert len(data) > 4 * decoding.LONG_BYTES
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await Answering(data).call(LIST_JOBS) == jobs
    counting.cancel()
    assert turns > len(data) // (2 * decoding._PART_BYTES)


async def test_parts_give_the_values_of_the_whole(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LONG_BYTES", 1)
    for value in (jobs, Jobs(jobs=[]), Machines(machines=[])):
        assert await decode_in_parts(msgspec.json.encode(value), type(value)) == value
    assert await decode_in_parts(b'{"unknown": 1, "machines": []}', Machines) == Machines(
        machines=[]
    )
    assert await decode_in_parts(b"[1, 2]", list[int]) == [1, 2]
    assert await decode_in_parts(b'{"a": 1}', dict[str, int]) == {"a": 1}


@pytest.mark.parametrize("cut", [1, 1_000, 900_000])
async def test_a_long_answer_that_is_malformed_is_a_protocol_error(jobs: Jobs, cut: int) -> None:
    data = msgspec.json.encode(jobs)[:-cut]
    with pytest.raises(ProtocolError, match="unknown format"):
        await Answering(data).call(LIST_JOBS)


async def test_an_item_of_another_type_is_a_protocol_error(jobs: Jobs) -> None:
    data = msgspec.json.encode(jobs).replace(b'"index":5999', b'"index":"x"')
    with pytest.raises(ProtocolError, match="unknown format"):
        await Answering(data).call(LIST_JOBS)
