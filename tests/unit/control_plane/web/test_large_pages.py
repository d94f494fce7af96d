"""Pages of many objects: their JSON is made in parts, and other work runs in between."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import msgspec.inspect as mi
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from test_hostile_texts import made

from control_plane.api.jobs import JobRecord, JobSpec, JobStatus, TaskRecord
from control_plane.api.ownership import ShardLoad, ShardLoads
from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.api.routes import ROUTES
from control_plane.identity.sessions import BrowserSessions
from control_plane.web.core.page_json import as_json
from control_plane.web.serving import Console
from wire.fairness import Peer
from wire.json_parts import PART
from wire.routes import Route
from wire.server import Call

pytestmark = pytest.mark.behaviour("FE1")

ANSWERS = {route.response for route in ROUTES if isinstance(route.response, type)}


@pytest.mark.parametrize("kind", sorted(ANSWERS, key=str), ids=lambda kind: kind.__name__)
def test_json_encoded_in_parts_equals_json_encoded_whole(kind: Any) -> None:
    values = {"answer": made(mi.type_info(kind)), "none": [], "by number": {3: "x"}}
    assert json.loads(as_json(values)) == json.loads(msgspec.json.encode(values, enc_hook=str))


def test_the_tasks_of_a_large_job_are_all_in_its_packed_json() -> None:
    spec = msgspec.structs.replace(made(mi.type_info(JobSpec)), name="web")
    tasks = [TaskRecord(index=n, version=1, generation=1) for n in range(2 * PART + 7)]
    record = JobRecord(name="web", spec=spec, version=1, tasks=tasks)
    status = msgspec.structs.replace(made(mi.type_info(JobStatus)), record=record)
    found = json.loads(gzip.decompress(as_json({"job": status, "not data": as_json}, packs=True)))
    assert found == {"job": json.loads(msgspec.json.encode(status))}


class RegionOfRoles:
    """A front end that knows shards and the status of their processes."""

    def __init__(self, *processes: ProcessStatus) -> None:
        self.sessions, self._processes = BrowserSessions(), list(processes)
        self.shards = 1
        self.handlers = {"list_shards": self._shards, "region_status": self._status}

    def authorize(self, _: web.Request, __: Route) -> Peer:
        return Peer("user", "ann")

    def check(self, _: Call) -> None:
        pass

    async def audit_refusal(self, *_: object) -> None:
        pass

    async def _shards(self, _: Call) -> ShardLoads:
        shard = ShardLoad(shard=1, machines=5, load=5, entitlements=["front"], jobs=1, tasks=4)
        west = ShardLoad(shard=2, region="west")
        return ShardLoads(shards=[shard, west][: self.shards], term=3)

    async def _status(self, _: Call) -> RegionStatus:
        return RegionStatus(ok=True, processes=self._processes)


async def page_of_shards(*processes: ProcessStatus) -> list[list[str]]:
    """Return the cells of the table of processes, row by row. The first row has the titles."""
    app = web.Application()
    Console(RegionOfRoles(*processes), ROUTES, lambda: 1).add_to(app)
    async with TestClient(TestServer(app)) as client:
        text = await (await client.get("/ui/shards")).text()
    rows = text.partition('aria-label="Processes"')[2].partition("</table>")[0].split("<tr>")[1:]
    return [
        [cell.partition(">")[2].removesuffix("</thead>").strip() for cell in row.split("<t")[1:]]
        for row in rows
    ]


async def test_the_page_of_shards_shows_how_far_each_role_is_behind() -> None:
    core = ProcessStatus(role="core", host="a", revision=1500, lag=0)
    shard = ProcessStatus(role="shard-1", host="b", revision=288, lag=1212)
    away = ProcessStatus(role="shard-2", ok=False, detail="no answer", host="c")
    titles, *rows = await page_of_shards(core, shard, away)
    found = {row[0]: row for row in rows}
    assert titles[6] == "Behind by"
    assert [found[role][6] for role in ("core", "shard-1", "shard-2")] == ["0", "1\u202f212", "–"]
    assert "no answer" in found["shard-2"][1]
    assert found["shard-1"][2] == "b"


@pytest.mark.behaviour("SH13")
@pytest.mark.parametrize("shards", [1, 2])
async def test_the_page_of_shards_has_scopes_where_one_is_regional(shards: int) -> None:
    region, app = RegionOfRoles(), web.Application()
    region.shards = shards
    Console(region, ROUTES, lambda: 1).add_to(app)
    async with TestClient(TestServer(app)) as client:
        text = await (await client.get("/ui/shards")).text()
    scopes = [">Scope<" in text, ">global<" in text, ">region west<" in text]
    assert scopes == [shards == 2] * 3


async def test_a_single_process_has_no_column_for_its_lag() -> None:
    titles, row = await page_of_shards(ProcessStatus(role="all", host="a", revision=15))
    assert row[0] == "all"
    assert "Behind by" not in titles
