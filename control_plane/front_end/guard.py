"""Checks before every handler whether the caller may make this call.

The rule is in the route table. The path parameters identify the object: a route with `{job}`,
`{task}` or `{entitlement}` in its path needs no code here. A route without a rule admits no user.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import Relaxation
from control_plane.api.capacity import EntitlementChange
from control_plane.api.intent_changes import PushChange
from control_plane.api.jobs import JobSpec
from control_plane.api.operations import JobMove
from control_plane.api.people import CurrentUser, Needs, Role
from control_plane.identity.core.permissions import (
    Caller,
    Refusal,
    refusal,
    refusal_without_sandbox,
)
from control_plane.identity.people import People
from control_plane.roles import ControlPlane
from wire.errors import Forbidden
from wire.fairness import Peer
from wire.peers import principal
from wire.routes import Route
from wire.server import Call

IDENTIFYING = frozenset(("job", "task", "entitlement"))
"""Path parameters that determine the entitlement."""
WITHOUT_HOST_ADMIN = frozenset(("stop_job", "pause_job", "put_hold"))
"""Routes that owners may use on a job without a sandbox, without the role of host admin."""


class Guard:
    """Decides about calls, from stored roles and owners."""

    def __init__(self, people: People, plane: ControlPlane) -> None:
        self.people = people
        self._plane = plane

    def caller(self, peer: Peer) -> Caller:
        """Return the caller with its rights: a user, or a peer at the local socket."""
        if peer.role == "local":
            root = peer.name == "local:0"  # other users of the socket need a grant
            return Caller(peer.name, is_operator=True, is_approver=True, is_host_admin=root)
        return self.people.user(principal(peer))

    def is_trusted(self, peer: Peer) -> bool:
        """Return whether a caller runs the region, which exempts it from the front end's quotas."""
        if peer.role == "user":
            return self.people.user(principal(peer)).is_operator
        return peer.is_trusted

    def check_early(self, peer: Peer, route: Route) -> None:
        """Refuse calls before their body is read, if the rule does not depend on the body."""
        if peer.role == "user" and route.needs not in ("", Needs.OWNER, Needs.ASKER):
            self._check(peer, route, {})

    def check(self, call: Call) -> None:
        """Raise `Forbidden` unless the caller may make this call."""
        if call.peer.role in ("user", "local") and call.route.needs:
            about = {name: self._plane.owners_of(name) for name in self._entitlements_in(call)}
            self._check(call.peer, call.route, about)
            if call.route.is_change and (job := self._unsandboxed_job(call)):
                self._raise_if_refused(
                    call.route, refusal_without_sandbox(self.caller(call.peer), job), call.peer
                )

    def _check(self, peer: Peer, route: Route, about: dict[str, Sequence[str] | None]) -> None:
        caller = self.caller(peer)
        needs = route.needs
        if needs in (Needs.OWNER, Needs.ASKER) and not IDENTIFYING.intersection(route.parameters):
            needs = Needs.OPERATOR  # the path names no entitlement
        owns_any = needs == Needs.ANY_OWNER and bool(self._entitlements_of(caller))
        self._raise_if_refused(route, refusal(needs, caller, about, owns_any), peer)

    def _raise_if_refused(self, route: Route, refused: Refusal | None, peer: Peer) -> None:
        if refused is not None:
            name, what = self.caller(peer).name, f"{route.method} {route.path}"
            raise Forbidden(f"{name} may not call {what}: {refused.reason}", hint=refused.hint)

    def _unsandboxed_job(self, call: Call) -> str:
        """Return the job whose tasks without a sandbox a call would run or enter; empty: none.

        Owners may apply a job whose new file has a sandbox again.
        """
        job = _job_of(call)
        spec = _spec_in(call)
        if spec is not None:
            return spec.name if Relaxation.RAW in spec.relaxations else ""
        if not job or call.route.name in WITHOUT_HOST_ADMIN:
            return ""
        return job if self._plane.is_raw(job) else ""

    def current_user(self, peer: Peer) -> CurrentUser:
        """Return the rights of a caller."""
        caller = self.caller(peer)
        owned = self._entitlements_of(caller)
        role = Role.OWNER if owned else Role.VIEWER
        return CurrentUser(
            name=caller.name,
            role=Role.OPERATOR if caller.is_operator else role,
            groups=sorted(caller.groups),
            owns=owned,
            host_admin=caller.is_host_admin,
        )

    def _entitlements_of(self, caller: Caller) -> list[str]:
        owners_of = self._plane.owners_of
        names = self._plane.entitlement_names()
        return [name for name in names if caller.is_among(owners_of(name) or ())]

    def _entitlements_in(self, call: Call) -> set[str]:
        """Return the entitlements that a call concerns, including the target of a move."""
        names = set()
        job = _job_of(call)
        if job and (entitlement := self._plane.entitlement_of(job)) is not None:
            names.add(entitlement)
        if call.route.name == "rollback_job" and job:
            names.add(self._plane.rollback_target(job) or "")
        if isinstance(call.body, JobMove):
            names.add(call.body.entitlement)
        if "entitlement" in call.path:
            names.add(call.path["entitlement"])
        if (spec := _spec_in(call)) is not None:
            names.add(spec.entitlement)
        if isinstance(call.body, EntitlementChange) and call.body.spec is not None:
            names.add(call.body.spec.materialization or "")
        return names - {""}


def _spec_in(call: Call) -> JobSpec | None:
    """Return the specification in a call, if there is one."""
    body = call.body.spec if isinstance(call.body, PushChange) else call.body
    return body if isinstance(body, JobSpec) else None


def _job_of(call: Call) -> str:
    """Return the job that the path of a call names, directly or by a task; empty: none."""
    return call.path.get("job") or call.path.get("task", "").rpartition("-")[0]
