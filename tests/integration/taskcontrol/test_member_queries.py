"""Controllers query application members over real sockets: members that lead, lie or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from taskcontrol import observations
from taskcontrol.observations import Dialect
from wire.errors import ConfigError

Answer = Callable[[web.Request], Awaitable[web.Response]]


def query_members(answers: list[object], ask) -> object:
    """Return the result of `ask(urls)` where each address answers every request with one value."""

    async def main() -> object:
        runners, urls = [], []
        for answer in answers:

            async def handler(request: web.Request, answer: object = answer) -> web.Response:
                if isinstance(answer, bytes):
                    return web.Response(body=answer)
                return web.json_response(answer)

            app = web.Application()
            app.router.add_route("*", "/{rest:.*}", handler)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            return await ask(urls)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(main())


ETCD = [
    {"header": {"member_id": "1"}, "leader": "2"},
    {"header": {"member_id": "2"}, "leader": "2"},
    {"header": {"member_id": "3"}, "leader": "2"},
]


@pytest.mark.behaviour("TC13")
@pytest.mark.parametrize(
    ("dialect", "answers", "expected"),
    [
        (Dialect.ETCD, ETCD, 1),
        (Dialect.ETCD, [{"header": {"member_id": "1"}}, ETCD[0]], None),
        (Dialect.ZOOKEEPER, [{"is_leader": False}, {"is_leader": True}], 1),
        (Dialect.PLAIN, [{"leader": True}, {"leader": False}, b"not JSON"], 0),
        (Dialect.PLAIN, [{"leader": True}, {"leader": True}], None),
        (Dialect.PLAIN, [[], "x", b"[" * 100_000], None),
        pytest.param(
            *(Dialect.PLAIN, [b'"\xff"', {"leader": True}], 1),
            marks=pytest.mark.behaviour("BUG-AG71"),
        ),
    ],
)
def test_one_process_leads_or_the_leader_is_unknown(dialect, answers, expected):
    assert query_members(answers, lambda urls: observations.leader(urls, dialect)) == expected


@pytest.mark.behaviour("TC14")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *((0.4, 0.4), ({"load": 0.6}, 0.6), (7, 1.0), (b"busy", 1.0), ({}, 1.0), (b"NaN", 1.0)),
        pytest.param({"load": "NaN"}, 1.0, marks=pytest.mark.behaviour("BUG-AG71")),
    ],
)
def test_a_missing_load_counts_as_full(answer, expected):
    assert query_members([answer], lambda urls: observations.load(urls[0])) == expected


def test_a_missing_member_is_not_the_leader():
    async def ask(urls: list[str]) -> object:
        return await observations.leader(["http://127.0.0.1:1", *urls], Dialect.PLAIN)

    assert query_members([{"leader": True}], ask) == 1


def test_a_map_of_shards_is_described_by_task():
    assert observations.by_task({"a": [0, 1], "b": [1]}) == {0: {"a"}, 1: {"a", "b"}}
    with pytest.raises(ConfigError, match="not a shard map"):
        observations.by_task({"a": "0"})
