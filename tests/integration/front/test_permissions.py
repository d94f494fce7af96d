"""Permissions: every kind of caller calls every route, on its own objects and on others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.api.capacity import DecisionNote, EntitlementChange, EntitlementSpec
from control_plane.api.health import ConfirmDown
from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    PushChange,
    SizeChange,
    SizeChanges,
)
from control_plane.api.inventory import Drain, Lend, Revoke, Undrain
from control_plane.api.jobs import JobSpec
from control_plane.api.limits import Lift
from control_plane.api.machines import TokenRequest
from control_plane.api.maintenance import GoOn, MaintenanceRequest, Reported
from control_plane.api.operations import JobMove, MoveRequest, RestartRequest
from control_plane.api.people import GroupSpec, Needs
from control_plane.api.profiles import ProfileProposal
from control_plane.api.rebalancing import PauseRequest
from control_plane.api.routes import ROUTES
from control_plane.api.shards import ShardMap
from control_plane.api.watch import WatchedJobs
from control_plane.api.weights import EndpointWeights
from control_plane.front_end.access import ROLES, check_role
from control_plane.front_end.guard import IDENTIFYING, Guard
from control_plane.identity.people import People
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.errors import Forbidden, TwineError, Unauthenticated
from wire.fairness import Peer
from wire.routes import Route
from wire.server import Call

from .conftest import Region, start_region

OPERATORS = {"local", "operator", "operator by group", "operator by grant"}
OWNERS = OPERATORS | {"owner", "owner by group"}
USERS = OWNERS | {"other owner", "viewer"}
ALL = USERS | {"anyone", "host", "component"}
CALLERS: dict[str, tuple[str, str]] = {
    "anyone": ("anyone", ""),
    "host": ("host", "vm1"),
    "component": ("component", "x"),
    "local": ("local", ""),
    "operator": ("user", "root"),
    "operator by group": ("user", "sue"),
    "operator by grant": ("user", "greta"),
    "owner": ("user", "ann"),
    "owner by group": ("user", "wendy"),
    "other owner": ("user", "otto"),
    "viewer": ("user", "vic"),
}
"""Caller → role and name. `web` belongs to ann and group:web, `other` to otto."""
# Written by hand, not read from the table: a new route fails here until its permissions are added.
# (on `web`, on `other`) where the owner matters; one set where it does not.
MAY_CALL: dict[str, set[str] | tuple[set[str], set[str]]] = {
    "get_authority": ALL,
    "join": ALL,
    "renew": {"host"},
    "fetch_image": USERS | {"host"},
    "list_jobs": USERS,
    "list_job_briefs": USERS,
    "apply_job": (OWNERS, OPERATORS | {"other owner"}),
    "plan_job": USERS,
    "explain_job": USERS,
    "get_job": USERS,
    "stop_job": (OWNERS, OPERATORS | {"other owner"}),
    **{
        f"{verb}_job": (OWNERS, OPERATORS | {"other owner"})
        for verb in ("pause", "resume", "restart", "rollback")
    },
    "move_job": (OWNERS, OPERATORS | {"other owner"}),
    "get_intents": USERS,
    **{
        name: (OWNERS, OPERATORS | {"other owner"})
        for name in ("put_push", "put_size", "put_canary", "put_hold", "withdraw_intent")
    },
    "put_infrastructure": OPERATORS,
    "put_sizes": (OWNERS, OPERATORS | {"other owner"}),
    "job_events": USERS,
    "task_story": USERS,
    "move_task": (OWNERS, OPERATORS | {"other owner"}),
    "describe_task": USERS,
    "restart_task": (OWNERS, OPERATORS | {"other owner"}),
    "exec_task": (OWNERS, OPERATORS | {"other owner"}),
    "job_logs": (OWNERS, OPERATORS | {"other owner"}),
    "get_endpoints": ALL,
    "watch_endpoints": ALL,
    "put_weights": (OWNERS, OPERATORS | {"other owner"}),
    "put_shards": (OWNERS, OPERATORS | {"other owner"}),
    "get_shards": USERS,
    "get_shard": ALL,
    "list_machines": USERS,
    "map_region": USERS,
    "describe_host": USERS,
    "list_sessions": USERS,
    "end_session": USERS,
    "get_machine": USERS,
    "remove_machine": OPERATORS,
    "import_machines": OPERATORS,
    "drain_machines": OPERATORS,
    "undrain_machines": OPERATORS,
    "label_machines": OPERATORS,
    "held_back_machines": USERS,
    "confirm_down": OPERATORS,
    "list_shards": USERS,
    "region_status": USERS,
    "shard_metrics": USERS,
    "move_entitlement": OPERATORS,
    "list_limits": USERS,
    "lift_limit": OPERATORS,
    "rebalance_status": USERS,
    "plan_rebalance": USERS,
    "rebalance_history": USERS,
    "explain_rebalance": USERS,
    "pause_rebalance": OPERATORS,
    "resume_rebalance": OPERATORS,
    "show_restored": OPERATORS,
    "release_restored": OPERATORS,
    "let_task_go": OPERATORS,
    "list_plans": USERS,
    "get_plan": USERS,
    "preview_plan": USERS,
    "accept_plan": OPERATORS,
    "cancel_plan": OPERATORS,
    "report_plan": OPERATORS,
    "resume_plan": OPERATORS,
    "lend_machine": OPERATORS,
    "revoke_machines": OPERATORS,
    "list_brokers": USERS,
    "broker_machines": USERS,
    "propose_profile": (OWNERS, OPERATORS | {"other owner"}),
    "get_profile_rollout": USERS,
    "rollback_profile": (OWNERS, OPERATORS | {"other owner"}),
    "profile_stats": USERS,
    "list_entitlements": USERS,
    "put_entitlement": OPERATORS,
    "delete_entitlement": (OWNERS, OPERATORS | {"other owner"}),
    "get_entitlement": USERS,
    "request_entitlement": (OWNERS, OPERATORS | {"other owner"}),
    "list_requests": USERS,
    "get_request": USERS,
    "approve_request": OPERATORS,
    "deny_request": OPERATORS,
    "withdraw_request": USERS,
    "get_capacity": USERS,
    "get_elastic": USERS,
    "get_buffers": USERS,
    "get_signal": USERS,
    "list_store_images": USERS | {"component"},
    "remove_image": OPERATORS,
    "push_image": OWNERS | {"other owner"},
    "certify_task": {"host"},
    "show_presence": {"host"},
    "sign_image": OWNERS | {"other owner"},
    "name_image": OWNERS | {"other owner"},
    "create_token": OPERATORS,
    "get_current_user": USERS,
    "list_operators": USERS,
    "grant_operator": OPERATORS,
    "revoke_operator": OPERATORS,
    "grant_host_admin": OPERATORS,
    "revoke_host_admin": OPERATORS,
    "list_groups": USERS,
    "put_group": OPERATORS,
    "delete_group": OPERATORS,
    "list_users": OPERATORS,
    "revoke_user": OPERATORS,
    "revoke_machine_identity": OPERATORS,
    "list_duplicates": OPERATORS,
    "forget_duplicate": OPERATORS,
    "get_roots": OPERATORS,
    "step_roots": OPERATORS,
    "list_audit": OPERATORS,
    "healthz": ALL,
    "readyz": ALL,
}
OWNED = {"web": ["user:ann", "group:web"], "other": ["user:otto"]}
DIGEST = "sha256:" + "0" * 64
PATH = {
    "index": "0",
    "machine": "no",
    "datacenter": "no",
    "request": "no",
    "digest": DIGEST,
    "plan": "no",
    "session": "no",
    "shard": "a",
    "limit": "no",
    "move": "p1.1",
    "task": "web-0",
    "unknown": "web-0",
    "dimension": "hold",
}
ELSEWHERE = {"group": "new", "who": "user:new", "admin": "user:new", "user": "new"}


def spec_of(entitlement: str) -> JobSpec:
    return JobSpec(
        name=f"job-of-{entitlement}",
        entitlement=entitlement,
        tasks=1,
        image=DIGEST,
        command=["/bin/true"],
    )


def body_of(route: Route, entitlement: str) -> Any:
    """Return a body with which a call reaches the permission check."""
    bodies: dict[Any, Any] = {
        JobSpec: spec_of(entitlement),
        EntitlementSpec: EntitlementSpec(machines=1, owners=["user:otto"]),
        EntitlementChange: EntitlementChange(spec=None, queue=True),
        Drain: Drain(machines=["no"], reason="x"),
        Undrain: Undrain(machines=["no"]),
        ConfirmDown: ConfirmDown(machines=["no"], reason="x"),
        MaintenanceRequest: MaintenanceRequest(machines=["no"], reason="x"),
        Reported: Reported(machines=["no"]),
        GoOn: GoOn(),
        Lift: Lift(reason="x"),
        PauseRequest: PauseRequest(reason="x"),
        MoveRequest: MoveRequest(reason="x"),
        RestartRequest: RestartRequest(),
        JobMove: JobMove(entitlement=entitlement),
        PushChange: PushChange(spec=spec_of(entitlement)),
        SizeChange: SizeChange(tasks=1),
        SizeChanges: SizeChanges(sizes={f"job-of-{entitlement}": SizeChange(tasks=1)}),
        CanaryChange: CanaryChange(lasts_s=60),
        HoldChange: HoldChange(lasts_s=60),
        InfrastructureChange: InfrastructureChange(runtime="r1"),
        ProfileProposal: ProfileProposal(text="= =", reason="x"),
        Lend: Lend(machine="no", borrower=entitlement),
        Revoke: Revoke(machines=["no"]),
        TokenRequest: TokenRequest(machine="vm9"),
        GroupSpec: GroupSpec(members=["x"]),
        EndpointWeights: EndpointWeights(weights={0: 200}),
        ShardMap: ShardMap(shards={"a": [0]}),
        WatchedJobs: WatchedJobs(known={"job-of-web": None}),
    }
    return bodies.get(route.request)


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    """A region with an entitlement of ann and group:web, and one of otto."""
    for region in start_region(tmp_path_factory.mktemp("owned")):
        asyncio.run(_furnish(region))
        yield region


async def _furnish(region: Region) -> None:
    async with region.client() as client:
        for name, members in (("web", ["wendy"]), ("sre", ["sue"])):
            await client.call(ROUTE["put_group"], GroupSpec(members=members), group=name)
        await client.call(ROUTE["grant_operator"], who="user:greta")
    _restore(region)


def _restore(region: Region) -> None:
    for name, owners in OWNED.items():
        spec = EntitlementSpec(machines=1, owners=owners)
        region.run(region.control_plane.portal.put(name, spec, jobs=[]))
        job = spec_of(name)
        region.control_plane.jobs[job.name] = job


ROUTE = {route.name: route for route in ROUTES}
CELLS = [(name, place) for name in MAY_CALL for place in ("web", "other")]


def test_every_route_has_a_rule() -> None:
    assert {r.name for r in ROUTES} == set(MAY_CALL)
    for route in ROUTES:
        assert route.needs or route.roles, f"{route.name} permits no caller"
        assert route.needs in ("", *Needs), f"{route.name}: {route.needs!r} is no rule"
        assert not {"user", "local"} & set(route.roles), (
            f"{route.name}: users are let in by `needs`"
        )


def test_routes_for_owners_name_the_owned_object() -> None:
    for route in ROUTES:
        if route.needs in (Needs.OWNER, Needs.ASKER):
            assert IDENTIFYING.intersection(route.parameters), route.name


def test_a_row_for_owners_that_names_nothing_is_for_operators(owned: Region) -> None:
    people = People(MemoryStore(), Runtime())
    guard = Guard(people, owned.control_plane)
    peer = Peer(name="spiffe://twine/user/ann", role="user")
    for needs in (Needs.OWNER, Needs.ASKER):
        with pytest.raises(Forbidden, match="ann is not an operator"):
            guard.check(Call(Route("new", "POST", "/v1/new", needs=needs), peer))


def test_a_route_without_a_rule_refuses_every_caller() -> None:
    for role in ROLES:
        for roles in ((), ("user", "local")):
            with pytest.raises((Forbidden, Unauthenticated)):
                check_role(Peer(name="x", role=role), Route("new", "GET", "/new", roles=roles))


@pytest.mark.behaviour("BUG-CP18", "F-78", "F-79")
@pytest.mark.parametrize(("name", "place"), CELLS)
def test_each_role_has_exactly_its_routes(owned: Region, name: str, place: str) -> None:
    """Regression: any user's credential could deploy into any entitlement."""
    route, rule = ROUTE[name], MAY_CALL[name]
    allowed = rule if isinstance(rule, set) else rule[place == "other"]

    async def found() -> dict[str, bool]:
        return {caller: await _passes(owned, route, caller, place) for caller in CALLERS}

    assert asyncio.run(found()) == {caller: caller in allowed for caller in CALLERS}


async def _passes(region: Region, route: Route, caller: str, place: str) -> bool:
    """Return whether a call passed the permission check; its own result does not matter."""
    role, name = CALLERS[caller]
    path = PATH | ELSEWHERE | {"job": f"job-of-{place}", "entitlement": place}
    given: dict[str, Any] = {k: path[k] for k in route.parameters}
    if "dry_run" in route.query:
        given["dry_run"] = "true"
    async with region.client(role, name or "x") as client:
        try:
            if route.stream_out:
                async for _ in client.stream(route, **given):
                    pass
            else:
                await client.call(route, body_of(route, place), **given)
        except Unauthenticated:
            assert caller == "anyone"
            return False
        except Forbidden as e:
            # A join without a token and a renewal of an unknown host are refused elsewhere.
            return "may not call" not in str(e)
        except TwineError:
            return True
        finally:
            if route.is_change:
                _restore(region)
    return True


@pytest.mark.behaviour("BUG-CP18")
def test_a_job_moves_only_if_the_caller_owns_both_entitlements(owned: Region) -> None:
    """Otto can neither move his job into `web` nor take one of theirs."""

    async def moved(name: str, into: str) -> None:
        job = spec_of(into)
        async with owned.client("user", "otto") as client:
            body = JobSpec(name=name, entitlement=into, tasks=1, image=DIGEST, command=job.command)
            await client.call(ROUTE["apply_job"], body, job=name, dry_run="true")

    for name, into in (("job-of-other", "web"), ("job-of-web", "other")):
        with pytest.raises(Forbidden, match="otto does not own entitlement 'web'"):
            asyncio.run(moved(name, into))
    with pytest.raises(Forbidden, match="there is no entitlement 'nowhere'"):
        asyncio.run(moved("fresh", "nowhere"))


@pytest.mark.behaviour("SC11")
def test_a_job_moves_only_between_entitlements_that_one_owns(owned: Region) -> None:
    """The rollback, too, needs the rights of both."""

    async def move(caller: str, name: str, into: str) -> None:
        async with owned.client("user", caller) as client:
            await client.call(ROUTE["move_job"], JobMove(entitlement=into), job=name)

    async def roll_back(caller: str, name: str) -> None:
        async with owned.client("user", caller) as client:
            await client.call(ROUTE["rollback_job"], job=name)

    for caller, name, into, lacks in (
        ("otto", "job-of-other", "web", "web"),
        ("otto", "job-of-web", "other", "web"),
        ("ann", "job-of-web", "other", "other"),
        ("vic", "job-of-web", "other", "other"),
    ):
        with pytest.raises(Forbidden, match=f"{caller} does not own entitlement '{lacks}'"):
            asyncio.run(move(caller, name, into))
    assert owned.control_plane.jobs["job-of-web"].entitlement == "web"
    asyncio.run(move("sue", "job-of-web", "other"))  # an operator
    assert owned.control_plane.jobs["job-of-web"].entitlement == "other"
    owned.control_plane.before["job-of-web"] = "web"
    try:
        with pytest.raises(Forbidden, match="otto does not own entitlement 'web'"):
            asyncio.run(roll_back("otto", "job-of-web"))
        asyncio.run(roll_back("sue", "job-of-web"))
    finally:
        owned.control_plane.before.clear()
        _restore(owned)


def test_a_job_stacks_only_on_machines_of_its_entitlement(owned: Region) -> None:
    async def ask() -> None:
        change = EntitlementChange(spec=EntitlementSpec(machines=1, materialization="web"))
        async with owned.client("user", "otto") as client:
            await client.call(ROUTE["request_entitlement"], change, entitlement="parasite")

    with pytest.raises(Forbidden, match="otto does not own entitlement 'web'"):
        asyncio.run(ask())


def test_a_refusal_names_the_missing_role_and_how_to_get_it(owned: Region) -> None:
    async def stop(caller: str) -> None:
        async with owned.client("user", caller) as client:
            await client.call(ROUTE["stop_job"], job="job-of-web")

    with pytest.raises(Forbidden) as refusal:
        asyncio.run(stop("otto"))
    assert str(refusal.value) == (
        "otto may not call DELETE /v1/jobs/{job}: otto does not own entitlement 'web', which"
        " belongs to user:ann, group:web"
    )
    assert refusal.value.hint == (
        "ask an owner or an operator: twinectl entitlement update web --add-owner user:otto"
    )
    assert len(refusal.value.request_id) == 16


@pytest.mark.behaviour("BUG-CP18")
def test_a_requester_owns_an_entitlement_after_approval(
    region: Region,
) -> None:
    """No user can grant machines to itself."""

    async def new_request() -> Any:
        async with region.client("user", "vic") as client:
            change = EntitlementChange(spec=EntitlementSpec(machines=1))
            return await client.call(ROUTE["request_entitlement"], change, entitlement="mine")

    async def approve(caller: str, request: str) -> Any:
        async with region.client("user", caller) as client:
            return await client.call(ROUTE["approve_request"], DecisionNote(), request=request)

    request = asyncio.run(new_request())
    assert (request.state.value, request.spec.owners) == ("pending", ["user:vic"])
    with pytest.raises(Forbidden, match="vic may not decide requests"):
        asyncio.run(approve("vic", request.request_id))
    assert asyncio.run(approve("bob", request.request_id)).state.value == "approved"
    assert region.control_plane.owners_of("mine") == ["user:vic"]


def test_a_role_that_is_taken_away_counts_from_the_next_request_on(region: Region) -> None:
    async def try_it() -> None:
        async with region.client() as local, region.client("user", "greta") as greta:
            await local.call(ROUTE["grant_operator"], who="user:greta")
            assert (await greta.call(ROUTE["get_current_user"])).role == "operator"
            await greta.call(ROUTE["put_group"], GroupSpec(members=["x"]), group="g")
            await local.call(ROUTE["revoke_operator"], who="user:greta")
            assert (await greta.call(ROUTE["get_current_user"])).role == "viewer"
            with pytest.raises(Forbidden, match="greta is not an operator"):
                await greta.call(ROUTE["put_group"], GroupSpec(members=[]), group="g")

    asyncio.run(try_it())


@pytest.mark.parametrize(("role", "status"), [("anyone", 401), ("host", 403), ("user", 200)])
def test_metrics_and_the_api_document_are_for_users(shared: Any, role: str, status: int) -> None:
    async def get(path: str) -> tuple[int, bytes]:
        async with shared.client(role) as client:
            answer = await client._open().get(client.endpoint + path)
            return answer.status, await answer.read()

    for path in ("/metrics", "/openapi.json"):
        found, body = asyncio.run(get(path))
        assert found == status, body
