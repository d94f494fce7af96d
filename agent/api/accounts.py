"""Objects on a host under the agent's roots, and their owners."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Bytes, Id, Reported, Words


class Account(Reported, frozen=True, kw_only=True):
    """One object on the host: its owner, and whether it stays."""

    kind: Id
    """`unit`, `cgroup`, `root`, `volume`, `scratch`, `image`, `layer`, `staging`, `record`,
    `namespace`, `veth`, `ports`, `mount`, `file`."""
    name: Words
    owner: Id = ""
    """`task web`, `image sha256:…`, `agent`; empty: it has no owner."""
    stays: bool = True
    why: Words = ""
    """Why it stays or goes."""
    bytes: Bytes | None = None
    """Its exclusive disk space, where the file system counts it."""
    wrong: bool = False
    """Whether it must not be there, or a part of it is missing."""


class Accounts(Reported, frozen=True, kw_only=True):
    """All objects, or a part of them."""

    accounts: Annotated[list[Account], Meta(max_length=1_000_000)]
    done: Annotated[list[Words], Meta(max_length=1_000_000)] = []
    """Descriptions of what was removed or repaired."""
