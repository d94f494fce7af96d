"""Users: their names, rights and credentials, and the entries of the audit log."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Name

_WHO = r"[a-z0-9][a-z0-9._-]{0,62}$(?!\n)"
UserName = Annotated[str, Meta(pattern=f"^{_WHO}", description="1 to 63 of a-z, 0-9, dot, - and _")]
Principal = Annotated[
    str, Meta(pattern=f"^(user|group):{_WHO}", description="user:NAME or group:NAME")
]


class Needs(StrEnum):
    """The right that a user needs for a call; one for each row of the route table."""

    VIEWER = "viewer"
    """Every user with a credential."""
    OWNER = "owner"
    """An owner of every entitlement that the call concerns: that of its job, or the named one."""
    ASKER = "asker"
    """Like `owner`; for a new entitlement every user, because the request waits for approval."""
    ANY_OWNER = "any-owner"
    """An owner of some entitlement."""
    APPROVER = "approver"
    """One of the portal's approvers."""
    OPERATOR = "operator"


class Role(StrEnum):
    """The roles of users, from the most to the least rights."""

    OPERATOR = "operator"
    """May do everything, except what needs a host admin."""
    HOST_ADMIN = "host-admin"
    """May have jobs whose tasks have no sandbox (`raw`), in addition to other rights."""
    OWNER = "owner"
    """May change the jobs of entitlements that name this user, or one of the user's groups."""
    VIEWER = "viewer"
    """May see everything except logs, and request an entitlement."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of a group."""

    members: Annotated[list[UserName], Meta(max_length=1000)]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group of users, as it is stored and shown."""

    schema: int = 1
    name: Name
    members: list[str] = []


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """All groups, by name."""

    groups: list[Group]


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """A role that was given to a user, as it is stored."""

    schema: int = 1
    who: str
    """`user:NAME` or `group:NAME`."""
    role: Role = Role.OPERATOR
    at: float = 0.0
    by: str = ""


class Grants(msgspec.Struct, frozen=True, kw_only=True):
    """The operators and host admins, apart from users of the local socket."""

    granted: list[Grant]
    configured: list[str]
    """Users of the configuration key `operators`."""


class Revocation(msgspec.Struct, frozen=True, kw_only=True):
    """A revocation, as it is stored: it voids certificates of a user that were issued before it."""

    schema: int = 1
    role: str
    """`user` or `host`."""
    name: str
    at: float
    """Seconds since 1970: certificates issued later are valid."""
    by: str = ""


class IssuedCredential(msgspec.Struct, frozen=True, kw_only=True):
    """A credential that was written to a file, for a user or a controller."""

    name: str
    role: str = "user"
    issued_at: float
    not_after: float
    issuer: str = ""
    """Pin of the root that issued it; empty: recorded by an earlier release."""
    trusts: list[str] = []
    """Pins of the roots that its holder trusts."""


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """The credentials of a user."""

    name: str
    issued_at: float | None = None
    """When the newest credential was written; None: none is valid."""
    not_after: float | None = None
    """When the last of the user's credentials expires."""
    revoked_at: float | None = None
    """Certificates issued until then are void."""


class Users(msgspec.Struct, frozen=True, kw_only=True):
    """All users with a credential, or with a revoked one, by name."""

    users: list[UserView]


class CurrentUser(msgspec.Struct, frozen=True, kw_only=True):
    """The caller, as the front end sees it."""

    name: str
    role: Role
    groups: list[str] = []
    owns: list[str] = []
    """Entitlements."""
    host_admin: bool = False


class ConsoleSession(msgspec.Struct, frozen=True, kw_only=True):
    """A browser that has the web console open."""

    session: str
    """12 hexadecimal digits. It is no secret: it counts only with the credential of `who`."""
    who: str
    address: str = ""
    """Its address; empty: the local socket."""
    browser: str = ""
    """The browser's own description."""
    opened_at: float
    """Seconds since 1970."""
    seen_at: float
    page: str = ""
    """The page that it last opened."""


class ConsoleSessions(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of the web console: the caller's own, or all for an operator."""

    sessions: list[ConsoleSession]


class Outcome(StrEnum):
    """The outcome of an attempt to change something."""

    BEGUN = "begun"
    """In progress, or the process ended before the outcome was recorded: read the object."""
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


OBJECT_KINDS = {
    **{kind: kind for kind in ("job", "task", "entitlement", "machine", "group")},
    **{"request": "entitlement-request", "digest": "image", "who": "operator"},
    **{"admin": "host-admin", "user": "user", "plan": "maintenance-plan"},
    **{kind: kind for kind in ("limit", "session")},
}
"""Path parameter → kind of the object in the audit log; the first one of a path counts."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt to change something."""

    schema: int = 1
    sequence: int
    at: float
    """Seconds since 1970."""
    caller: str
    """`user:NAME`, `host:NAME`, `local:UID`, or `anyone` without a certificate."""
    address: str = ""
    """The caller's address; empty: the local socket."""
    request_id: str
    action: str
    """The name of the route, such as `apply_job`."""
    object: str
    """The object of the attempt, such as `job/web`."""
    also: list[str] = []
    """Further objects that it changed, such as the machines of a drain; at most 100."""
    detail: str = ""
    """A short form of the request; never the environment of a task."""
    outcome: Outcome = Outcome.BEGUN
    reason: str = ""
    """Why it failed or was refused."""
    before: int | None = None
    """Revision of the object's record before and after; None: it has none."""
    after: int | None = None
    suppressed: int = 0
    """Refused attempts of this caller since the entry before that were not recorded."""
    latest: float = 0.0
    """The latest time of an older entry, if the clock was set back since then; otherwise 0."""


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the audit log, the newest first."""

    entries: list[AuditEntry]
    next: int = 0
    """Pass it as `before` for older entries; 0: there are none."""
