"""A task's place in the network: whose it is, which ports it has, who may reach it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Name, Port, Written


class NetworkMode(StrEnum):
    """Whose network a task lives in."""

    HOST = "host"
    """The host's: its ports are the machine's, and it binds those that it was given alone."""
    PRIVATE = "private"
    """Its own: a namespace with addresses of its own, and every port is free."""


class Reach(Written, frozen=True, kw_only=True):
    """What an owner says of the network of each of a job's tasks."""

    mode: NetworkMode = NetworkMode.HOST
    egress_mbps: Annotated[float, Meta(ge=0.1, le=1_000_000)] | None = None
    """Most it may send, in millions of bits a second; `private` only."""
    allow_from: Annotated[list[Name], Meta(max_length=64)] = []
    """Tasks, or jobs with all their tasks, of the same entitlement that may open connections to
    it; `private` only. Tasks of other machines are told apart by address: see docs/network.md."""
    unix_sockets: bool = False
    """Whether it may open sockets of the family AF_UNIX in `host` mode: with them it reaches the
    abstract sockets of the whole host. A private network has its own, so there they are free."""


class Network(Reach, frozen=True, kw_only=True):
    """The network of one task: what its owner said, and the ports it was given."""

    ports: Annotated[dict[Name, Port], Meta(max_length=64)] = {}
    """By name; each is in the environment, too: `TWINE_PORT_HTTP`."""


def contradiction(reach: Reach) -> str:
    """Return what cannot be had in the host's network, empty where all fits together."""
    if reach.mode is NetworkMode.PRIVATE:
        return ""
    asked = {"egress_mbps": reach.egress_mbps, "allow_from": reach.allow_from}
    names = [name for name, value in asked.items() if value]
    if not names:
        return ""
    return f"network.{names[0]} needs a network of its own (network.mode = private)"


def port_variable(name: str) -> str:
    """Return the environment variable that a task reads one of its ports from."""
    return f"TWINE_PORT_{name.upper().replace('-', '_')}"
