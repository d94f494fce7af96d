"""Sends requests about jobs to the process of their shard, and merges lists over shards.

If a shard does not answer, requests about its jobs fail with one error and may be tried again;
lists contain the stored state of its jobs. After each answer the core waits until it has read what
the shard had written, so that a client reads its own writes.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from control_plane.api.jobs import Jobs, JobStatus
from control_plane.api.machines import MachineRecord, Machines, MachineView, RegionMap
from control_plane.api.maintenance import PlacesFound, PlacesRequest
from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.api.shard_routes import (
    CALLER_HEADER,
    CORE_HEADER,
    FIND_PLACES,
    FORWARDED,
    PROCESS_STATUS,
    RELEASE_IDLE,
    REVISION_HEADER,
    SHARD_ROUTES,
)
from control_plane.broker.core.region_map import merged
from control_plane.front_end.recorder import caller_of
from control_plane.roles import ControlPlane
from control_plane.scheduler.core.rollout import summarize
from control_plane.shard_processes import ShardProcesses
from control_plane.shards.processes import RoleLeaders, shard_unavailable
from control_plane.shards.status import unavailable_status
from control_plane.status_calls import NEEDS_ONE_PROCESS
from wire.client import WireClient
from wire.duplex import relay_to
from wire.errors import Busy, Conflict, TwineError, Unreachable
from wire.routes import Route
from wire.server import Call, Handler

log = logging.getLogger(__name__)
_ROUTES = {route.name: route for route in SHARD_ROUTES}
_ONE_PROCESS_ONLY = frozenset(("plan_rebalance", "resume_rebalance"))
"""Routes that are disabled while shards run in other processes (docs/adr/0200)."""
_CALL_S = 10.0
"""Time limit of one request; a process that exceeds it counts as away."""
_BEHIND_S = 2.0
_READY_TIMEOUT_S = 2.0
"""Time limit of the check whether a shard is ready to get an entitlement."""
_CALLER: ContextVar[str] = ContextVar("caller", default="component:control-plane")
"""The caller whose request the present asyncio task forwards."""


class CoreState(NamedTuple):
    """The state of a core, sent with each request to a shard."""

    life: str
    """Identifier of this run of its process."""
    written: int
    """The newest revision that it has written."""

    def headers(self) -> dict[str, str]:
        """Return the state as HTTP headers."""
        return {CORE_HEADER: self.life, REVISION_HEADER: str(self.written)}


class ShardClient(WireClient):
    """A client of the process of one shard."""

    max_answer_bytes = 2 << 30

    def __init__(
        self, url: str, shard: int, core: Callable[[], CoreState], tls: ssl.SSLContext | None
    ) -> None:
        """`core` returns what each request states about the core. No connection is opened yet."""
        super().__init__(url, tls, timeout_s=_CALL_S)
        self.headers = lambda: {CALLER_HEADER: _CALLER.get(), **core().headers()}
        self.expected, self.shard = f"/component/shard-{shard}", shard
        self.revision = 0
        """Newest revision that the shard had written at its last answer."""
        self.on_answer = self._note

    def _note(self, headers: Mapping[str, str]) -> None:
        revision = headers.get(REVISION_HEADER, "")
        if revision.isdecimal():
            self.revision = max(self.revision, int(revision))


Connect = Callable[[str, int, Callable[[], CoreState]], ShardClient]
"""Makes a client of the process of a shard: URL, number, state of the core."""


class Forwarding:
    """Wraps the handlers of a core; returns them unchanged if all roles run in one process."""

    def __init__(self, control_plane: ControlPlane, connect: Connect | None) -> None:
        """`connect` makes clients of shards; None: no other process runs a shard."""
        self._plane, self._connect = control_plane, connect
        self._clients: dict[int, ShardClient] = {}
        if connect is not None:
            control_plane.ask_shard = self._release_idle
            control_plane.maintenance.previewer.ask_others = self._find_places
            if isinstance(control_plane.shards, ShardProcesses):
                control_plane.shards.ask_ready = self._is_ready

    def wrap(self, route: Route, handler: Handler) -> Handler:
        """Return a handler that forwards a call to its shard."""
        if self._connect is None:
            return handler
        if route.name in FORWARDED:
            return partial(self._forward, handler)
        merging = {
            "list_jobs": self._list_jobs,
            "list_machines": self._list_machines,
            "map_region": self._map_region,
            "get_machine": self._get_machine,
            "region_status": self._region_status,
            "shard_metrics": self._shard_metrics,
        }
        if route.name in _ONE_PROCESS_ONLY:
            return partial(self._refuse_with_shards, handler)
        found = merging.get(route.name)
        return handler if found is None else partial(found, handler)

    async def _refuse_with_shards(self, handler: Handler, call: Call) -> Any:
        """Refuse calls that are disabled while shards run in other processes."""
        shards = self._plane.shards
        if shards.count > len(shards.all):
            raise Conflict(
                f"{call.route.name.replace('_', ' ')}: {NEEDS_ONE_PROCESS}",
                hint='run all shards in one process (role = "all"), docs/scale.md says how',
            )
        return await handler(call)

    def is_local(self, call: Call) -> bool:
        """Return whether this process answers a call about an existing job."""
        if self._connect is None:
            return True
        number = self._plane.shards.number_of_job(call.path["job"])
        return number is None or self._plane.role.runs(number)

    # -- one shard

    async def _forward(self, handler: Handler, call: Call) -> Any:
        number = await self._number_of(call)
        if number is None or self._plane.role.runs(number):
            return await handler(call)
        client = self._client(number)
        return await self._call(client, _ROUTES[call.route.name], call)

    async def _number_of(self, call: Call) -> int | None:
        """Return the number of the shard that answers a call; None: its object does not exist."""
        shards, name = self._plane.shards, call.route.name
        if (name == "apply_job" and not call.flag("dry_run")) or name == "move_job":
            await shards.assign_unused(call.body.entitlement)
        number = shards.number_of_job(call.path["job"])
        if number is None and name in ("apply_job", "plan_job"):
            number = shards.number_of_entitlement(call.body.entitlement)
        return number

    async def _call(self, client: ShardClient, route: Route, call: Call) -> Any:
        _CALLER.set(caller_of(call.peer))
        try:
            parameters: dict[str, Any] = {**call.path, **call.query}
            if route.duplex:
                return await relay_to(client.open_duplex(route, **parameters))
            answer = await client.call(route, call.body, **parameters)
        except Unreachable as e:
            raise shard_unavailable(client.shard, str(e)) from e
        await self._follow_answer(client)
        return answer

    async def _follow_answer(self, client: ShardClient) -> None:
        await self._plane.followed(client.revision, _BEHIND_S)

    async def _release_idle(self, number: int, entitlement: str) -> None:
        client = self._client(number)
        try:
            await client.call(RELEASE_IDLE, entitlement=entitlement)
        except Unreachable as e:
            raise shard_unavailable(number, str(e)) from e
        await self._follow_answer(client)

    async def _find_places(self, request: PlacesRequest) -> PlacesFound:
        """Return the places that processes of shards find; shards that are away are skipped."""
        shards = self._plane.shards
        by_shard: dict[int, dict[str, list[int]]] = {}
        for job, tasks in request.tasks.items():
            number = shards.number_of_job(job)
            if number is not None and not self._plane.role.runs(number):
                by_shard.setdefault(number, {})[job] = tasks

        async def ask(number: int, jobs: dict[str, list[int]]) -> PlacesFound:
            try:
                body = PlacesRequest(tasks=jobs, leave=request.leave)
                answer: PlacesFound = await self._client(number).call(FIND_PLACES, body)
            except TwineError as e:
                log.warning(
                    "the search for other machines failed",
                    extra={"shard": number, "reason": str(e)},
                )
                return PlacesFound()
            return answer

        answers = await asyncio.gather(*(ask(n, jobs) for n, jobs in by_shard.items()))
        return PlacesFound(jobs={n: of for answer in answers for n, of in answer.jobs.items()})

    async def _is_ready(self, number: int) -> bool:
        """Return whether the process of a shard takes requests now."""
        try:
            await self._client(number).call(_ROUTES["readyz"], timeout_s=_READY_TIMEOUT_S)
        except TwineError:
            return False
        return True

    def _client(self, number: int) -> ShardClient:
        """Return a client of a shard's process, at the address of its newest leader.

        Raises `Busy` if this core no longer leads, as after a pause: a shard that has not read of
        the next election would carry its request out.
        """
        assert self._connect is not None
        if failure := self._processes.table.store.failure():
            raise Busy(f"this control plane passes on no request: {failure}", hint="try again")
        url = self._processes.url_of(number)
        known = self._clients.get(number)
        if known is None or known.endpoint != url:
            known = self._clients[number] = self._connect(url, number, self._core_state)
        return known

    def _core_state(self) -> CoreState:
        return CoreState(self._plane.role.life, self._processes.table.store.revision())

    @property
    def _processes(self) -> RoleLeaders:
        assert self._plane.processes is not None
        return self._plane.processes

    # -- all shards

    async def _ask_all(self, call: Call, name: str = "") -> dict[int, Any]:
        """Return the answer of each shard that runs in another process, or its error.

        Without `name`, it calls the route of the call.
        """
        shards = self._plane.shards
        others = [n for n in range(shards.count) if not self._plane.role.runs(n)]

        async def ask(number: int) -> Any:
            try:
                route = _ROUTES[name or call.route.name]
                return await self._call(self._client(number), route, call)
            except TwineError as e:
                return e

        return dict(zip(others, await asyncio.gather(*map(ask, others)), strict=True))

    async def _region_status(self, _: Handler, call: Call) -> RegionStatus:
        answers = await self._ask_all(call, PROCESS_STATUS.name)
        loads = {load.shard: load for load in self._plane.shards.loads()}
        return self._plane.region_status(
            [
                answer
                if isinstance(answer, ProcessStatus)
                else unavailable_status(n, str(answer), self._processes.leader_of(n), loads[n])
                for n, answer in answers.items()
            ]
        )

    async def _shard_metrics(self, handler: Handler, call: Call) -> AsyncIterator[bytes]:
        number = self._plane.shards.parse_number(call.path["shard"])
        if number is None or self._plane.role.runs(number):
            answer: AsyncIterator[bytes] = await handler(call)
            return answer
        return self._client(number).stream(_ROUTES["shard_metrics"], shard=str(number))

    async def _list_jobs(self, handler: Handler, call: Call) -> Jobs:
        answers = await self._ask_all(call)
        own: Jobs = await handler(call)
        found = {status.record.name: status for status in own.jobs}
        for number, answer in answers.items():
            if isinstance(answer, Jobs):
                found |= {status.record.name: status for status in answer.jobs}
            else:
                found |= self._stored_jobs(number, str(answer))
        return Jobs(jobs=[found[name] for name in sorted(found)])

    def _stored_jobs(self, number: int, why: str) -> dict[str, JobStatus]:
        """Return the stored jobs of a shard that is away."""
        records = self._plane.job_records()
        shards = self._plane.shards
        return {
            record.name: summarize(record, why)
            for record in records
            if shards.number_of_job(record.name) == number
        }

    async def _list_machines(self, handler: Handler, call: Call) -> Machines:
        answers = await self._ask_all(call)
        page: Machines = await handler(call)
        seen: dict[str, MachineView] = {}
        for number, answer in answers.items():
            if isinstance(answer, Machines):
                reported = (v for v in answer.machines if self._shard_of(v) == number)
                seen |= {view.record.machine: view for view in reported}
        views = [self._with_report(view, seen.get(view.record.machine)) for view in page.machines]
        return replace(page, machines=views)

    async def _map_region(self, _: Handler, call: Call) -> RegionMap:
        """Return the map with each shard's own report of its machines."""
        answers = await self._ask_all(call)
        maps = {n: answer for n, answer in answers.items() if isinstance(answer, RegionMap)}
        shard_of = self._plane.ownership.shard_of

        def is_left(record: MachineRecord) -> bool:
            return not record.entitlement or shard_of(record.entitlement) not in maps

        by = call.query.get("by", "state")
        return merged(await self._plane.inventory.region_map(by, is_left), [*maps.values()])

    async def _get_machine(self, handler: Handler, call: Call) -> MachineView:
        view: MachineView = await handler(call)
        number = self._shard_of(view)
        if number is None:
            return view
        reported = await self._call(self._client(number), _ROUTES[call.route.name], call)
        return self._with_report(view, reported)

    def _shard_of(self, view: MachineView) -> int | None:
        """Return the shard whose process follows a machine; None: this process does."""
        pool = view.record.entitlement
        number = self._plane.ownership.shard_of(pool)
        return None if not pool or self._plane.role.runs(number) else number

    def _with_report(self, view: MachineView, reported: MachineView | None) -> MachineView:
        """Return a machine with the report of the process that follows it."""
        if reported is None:
            return view
        return replace(
            view, ready=reported.ready, last_seen_s=reported.last_seen_s, health=reported.health
        )
