"""Who may call what: every route with every role (trust.md's F-78, F-79 in short)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent.errors import Forbidden, TwineError, Unauthenticated
from agent.wire.routes import Route
from agent.wire.server import Peer
from control_plane.api.routes import ROUTES
from control_plane.server.access import ROLES, check_role

USER = {"user", "local"}
# Written by hand, not read from the table: a new route fails here until somebody decides.
MAY_CALL: dict[str, set[str]] = {
    "get_authority": set(ROLES),
    "join": set(ROLES),
    "renew": {"host"},
    "fetch_image": {"host", "user", "local"},
    "list_jobs": USER,
    "apply_job": USER,
    "plan_job": USER,
    "explain_job": USER,
    "get_job": USER,
    "stop_job": USER,
    "job_logs": USER,
    "get_endpoints": set(ROLES),
    "list_machines": USER,
    "get_machine": USER,
    "remove_machine": USER,
    "import_machines": USER,
    "drain_machines": USER,
    "undrain_machines": USER,
    "lend_machine": USER,
    "revoke_machines": USER,
    "list_brokers": USER,
    "broker_machines": USER,
    "list_entitlements": USER,
    "put_entitlement": USER,
    "delete_entitlement": USER,
    "get_entitlement": USER,
    "request_entitlement": USER,
    "list_requests": USER,
    "get_request": USER,
    "approve_request": USER,
    "deny_request": USER,
    "withdraw_request": USER,
    "get_capacity": USER,
    "list_store_images": USER,
    "push_image": USER,
    "create_token": USER,
    "healthz": set(ROLES),
    "readyz": set(ROLES),
}
PATH = {
    "job": "nothing",
    "index": "0",
    "machine": "nothing",
    "datacenter": "nothing",
    "entitlement": "nothing",
    "request": "nothing",
    "digest": "sha256:" + "0" * 64,
}


def test_every_route_has_a_rule() -> None:
    assert {r.name for r in ROUTES} == set(MAY_CALL)


def test_a_route_without_a_rule_lets_nobody_in() -> None:
    for role in ROLES:
        with pytest.raises((Forbidden, Unauthenticated)):
            check_role(Peer(name="x", role=role), Route("new", "GET", "/new"))


@pytest.mark.parametrize("role", ROLES)
def test_each_role_gets_through_exactly_where_it_may(shared: Any, role: str) -> None:
    async def outcome(route: Route) -> bool:
        async with shared.client(role) as client:
            path = {k: PATH[k] for k in route.parameters}
            try:
                if route.stream_out:
                    async for _ in client.stream(route, **path):
                        pass
                else:
                    await client.call(route, **path)
            except Unauthenticated:
                assert role == "anyone"
                return False
            except Forbidden as e:
                # A join without a token and a renewal of an unknown host are refused later.
                return "may not call" not in str(e)
            except TwineError:
                return True
            return True

    async def every() -> dict[str, bool]:
        return {r.name: await outcome(r) for r in ROUTES}

    assert asyncio.run(every()) == {name: role in roles for name, roles in MAY_CALL.items()}


@pytest.mark.parametrize(("role", "status"), [("anyone", 401), ("host", 403), ("user", 200)])
def test_metrics_and_the_api_document_are_for_operators(
    shared: Any, role: str, status: int
) -> None:
    async def get(path: str) -> tuple[int, bytes]:
        async with shared.client(role) as client:
            answer = await client._open().get(client.endpoint + path)
            return answer.status, await answer.read()

    for path in ("/metrics", "/openapi.json"):
        found, body = asyncio.run(get(path))
        assert found == status, body
