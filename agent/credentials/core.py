"""Decides which unit may read which credential, by the address of systemd's socket."""

from __future__ import annotations

import re
from collections.abc import Iterable

from agent.api import TaskSpec
from agent.runtime.core.records import unit_of

_SOCKET_ADDRESS = re.compile(rb"\0[0-9a-f]+/unit/([^/]+)/([^/]+)")
"""The address that systemd binds to before it connects (systemd.exec(5), LoadCredential=)."""
_STEP = re.compile(r"twine-step-([a-z0-9-]+)\.service")
_INSIDE = re.compile(r"twine-in-([a-z0-9-]+)\..+\.service")
_TASK = re.compile(r"twine-task-([a-z0-9-]+)\.service")


def requested_credential(address: bytes) -> tuple[str, str] | None:
    """Return the task and the credential that an address names; None if it names no task.

    The unit is the task's own, one of its init steps, or a command inside it.
    """
    match = _SOCKET_ADDRESS.fullmatch(address)
    if match is None:
        return None
    unit, name = (part.decode(errors="replace") for part in match.groups())
    for pattern in (_TASK, _STEP, _INSIDE):
        if of_task := pattern.fullmatch(unit):
            return of_task[1], name
    return None


def credential_properties(spec: TaskSpec, socket: str) -> dict[str, object]:
    """Return the properties by which systemd fetches a task's credentials at each start.

    The configuration is not secret and is in the unit itself.
    """
    properties: dict[str, object] = {}
    if spec.credentials:
        properties["LoadCredential"] = [f"{name}:{socket}" for name in sorted(spec.credentials)]
    if spec.configuration:
        texts = sorted(spec.configuration.items())
        properties["SetCredential"] = {name: text.encode() for name, text in texts}
    return properties


def missing(spec: TaskSpec, held: Iterable[tuple[str, str]]) -> list[str]:
    """Return which of a task's credentials are not among those held for its entitlement."""
    names = {name for entitlement, name in held if entitlement == spec.entitlement}
    return sorted(set(spec.credentials.values()) - names)


def why_missing(task_id: str, spec: TaskSpec, names: list[str]) -> str:
    """Describe why a task cannot be started: credentials with these names are missing."""
    return (
        f"{unit_of(task_id)} is not started: this host holds no credential "
        f"{', '.join(names)} of entitlement {spec.entitlement}"
    )
