"""Checks the specification of a task with its own init (docs/agent.md, ADR 0106)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from agent.api.network import NetworkMode, Reach
from agent.api.relaxations import Relaxation
from agent.api.resources import Resources

CAPABILITY = "own-init"
"""Capability of a host that can start such tasks: it has systemd-nspawn."""
NESTED = "nested"
"""Capability of a host whose tasks can run containers. Older agents report only `own-init`."""


def contradictions(
    relaxations: Collection[Relaxation],
    command: Sequence[str],
    network: Reach,
    resources: Resources,
) -> Iterator[tuple[str, str]]:
    """Yield field and reason of each contradiction to `own-init` or `nested`."""
    if Relaxation.OWN_INIT not in relaxations:
        if Relaxation.NESTED in relaxations:
            yield (
                "relaxations",
                "nested requires own-init: only a system container can run containers",
            )
        return
    others = sorted({*relaxations} - {Relaxation.OWN_INIT, Relaxation.NESTED})
    if others:
        also = (
            "raw has no sandbox" if Relaxation.RAW in others else "it already has what they allow"
        )
        yield "relaxations", f"own-init cannot be combined with {', '.join(others)}: {also}"
    if command:
        yield "command", "a task with own-init cannot have one: it runs the init of its image"
    if network.mode is not NetworkMode.PRIVATE:
        yield "network.mode", "own-init requires a private network"
    for field in ("hugepages_2mib", "hugepages_1gib"):
        if getattr(resources, field):
            yield f"resources.{field}", "a task with own-init cannot have its own huge pages"
