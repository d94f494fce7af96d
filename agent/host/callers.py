"""Authorizes callers of the agent, and decides which may run a task without a sandbox."""

from __future__ import annotations

import grp
import logging
import pwd
from collections.abc import Callable

from aiohttp import web

from agent.api import COUNT_MAX, Relaxation, TaskSpec
from agent.api.term import HEADER, OWNER_HEADER
from agent.lease.fencing import FencingOwners, FencingTerm
from wire.errors import Forbidden, InvalidInput, Unauthenticated
from wire.fairness import Peer
from wire.peers import local_user, tls_peer
from wire.routes import Route
from wire.tls import FRONT_END

log = logging.getLogger(__name__)

LOCAL_GENERATION_MAX = COUNT_MAX >> 1
"""Highest generation of a local caller; the control plane can always send a higher one."""
_ROOT_ONLY = {
    Relaxation.RAW: "has no sandbox",
    Relaxation.OWN_INIT: "has an init of its own",
}
"""Relaxations that only root may request on the local socket, with their effect."""


def check_raw(peer: Peer, task_id: str, spec: TaskSpec) -> None:
    """Raise `Forbidden` if a caller without root rights starts or enters a task that gives them.

    Members of the socket's group are not root. The control plane checks its own callers
    (docs/adr/0092). Each use is logged in this host's journal.
    """
    privileged = [name for name in _ROOT_ONLY if name in spec.relaxations]
    if not privileged:
        return
    if peer.role == "local" and peer.name != "local:0":
        raise Forbidden(
            f"task {task_id} {_ROOT_ONLY[privileged[0]]} (`{privileged[0]}`): only root may "
            "request that on this socket",
            hint="request other relaxations (docs/security.md), or call as root",
        )
    if Relaxation.RAW in privileged:
        log.warning("a task without a sandbox", extra={"task": task_id, "by": peer.name})


def check_local_version(
    peer: Peer, what: str, generation: int | None, epoch: int | None = None, term: int = 0
) -> None:
    """Raise `InvalidInput` for a version of a local caller that the control plane cannot exceed.

    The control plane answers an unknown generation with a higher one, so a local caller may use
    only the lower half of the range (BUG-HT25). Epochs belong to the control plane. After an epoch
    above `term`, the latest one that it sent, all its requests would be refused.
    """
    if peer.role != "local":
        return
    if epoch is not None and epoch > term:
        raise InvalidInput(
            f"{what} cannot have epoch {epoch}: the latest control plane known here has "
            f"epoch {term}",
            hint="leave it out: the current epoch applies",
        )
    if generation is not None and generation > LOCAL_GENERATION_MAX:
        raise InvalidInput(
            f"{what} cannot have generation {generation}: at most {LOCAL_GENERATION_MAX} "
            "can be given here",
            hint="the current generation plus one suffices",
        )


def authorize_with(
    socket_group: str,
    domain: Callable[[], str] = lambda: "",
    last_term: FencingTerm | None = None,
    last_owners: FencingOwners | None = None,
) -> Callable[[web.Request, Route], Peer]:
    """Return the agent's authorization: local root and group, or a component of the cluster.

    On the unix socket the kernel reports the caller's user (SO_PEERCRED). On TCP only a certificate
    of the role `component` may call, never another host, a user or a front end (trust F-79).
    Refuses a control plane whose store is older than the one this host knows (docs/adr/0111).
    Refuses changes by an earlier owner of an entitlement (docs/adr/0150).
    """

    def authorize(request: web.Request, route: Route) -> Peer:
        user = local_user(request.transport)
        if user is not None:
            uid, gid = user
            if uid == 0 or _is_member(uid, gid, socket_group):
                return Peer(name=f"local:{uid}", role="local", is_trusted=True)
            raise Forbidden(
                f"user {uid} may not call {route.name}",
                hint=f"be root or a member of group {socket_group}",
            )
        peer = tls_peer(request.transport, domain())
        if peer is None:
            raise Unauthenticated("the connection does not prove an identity")
        if peer.role != "component" or peer.name.endswith(FRONT_END):
            raise Forbidden(f"{peer.name} may not call {route.name} of an agent")
        commands = route.method != "GET"
        if last_term is not None:
            last_term.check(request.headers.get(HEADER), commands=commands)
        if last_owners is not None:
            last_owners.check(request.headers.get(OWNER_HEADER), commands=commands)
        return peer

    return authorize


def _is_member(uid: int, gid: int, group: str) -> bool:
    try:
        entry = grp.getgrnam(group)
    except KeyError:
        return False
    return gid == entry.gr_gid or uid in map(_uid, entry.gr_mem)


def _uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
