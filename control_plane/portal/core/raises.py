"""Finds what a change of an entitlement raises: its capacity, its priority or its rights."""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import Relaxation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.settings import Raise


def asks_for_more(before: EntitlementSpec | None, after: EntitlementSpec) -> bool:
    """Return whether a change may take capacity that other entitlements could have had.

    Fewer of the same machines do not count as more. Other types or another place do: those machines
    may be scarcer than the present ones.
    """
    if before is None:
        return True
    return bool(
        _bounds_loosened(before, after)
        or _unit(before) != _unit(after)
        or _types_changed(before, after)
        or after.datacenter != before.datacenter
        or after.region != before.region
        or after.materialization != before.materialization
        or after.business_unit != before.business_unit
        or after.priority > before.priority
        or after.overcommit.cpu > before.overcommit.cpu
        or after.overcommit.memory > before.overcommit.memory
    )


def raises(before: EntitlementSpec | None, after: EntitlementSpec) -> dict[Raise, str]:
    """Return what a change raises: kind → description.

    A new entitlement is compared with one that asks for a quota only.
    """
    base = before if before is not None else EntitlementSpec()
    found = dict[Raise, str]()
    if asks_for_more(before, replace(after, priority=base.priority)):
        found[Raise.CAPACITY] = "more capacity"
    if after.priority > base.priority:
        found[Raise.PRIORITY] = f"priority {after.priority} instead of {base.priority}"
    rights = list[str]()
    if allowed := newly_allowed(before, after):
        rights.append(f"the relaxations {', '.join(allowed)} of its jobs")
    if base.image_keys and (not after.image_keys or {*after.image_keys} - {*base.image_keys}):
        rights.append("the change or removal of its image keys")
    if rights:
        found[Raise.RIGHTS] = " and ".join(rights)
    return found


def newly_allowed(before: EntitlementSpec | None, after: EntitlementSpec) -> list[Relaxation]:
    """Return the relaxations that a change allows to jobs for the first time."""
    return sorted({*after.relaxations} - {*(before.relaxations if before else ())})


def _bounds_loosened(before: EntitlementSpec, after: EntitlementSpec) -> bool:
    pairs = ((before.machines, after.machines), (before.rru, after.rru))
    return any(b is not None and (a is None or a > b) for b, a in pairs)


def _types_changed(before: EntitlementSpec, after: EntitlementSpec) -> bool:
    if set(before.machine_types) != set(after.machine_types):
        return True
    if after.machines is not None and before.per_type and after.per_type != before.per_type:
        return True  # as many machines as before, but of a different mix
    if bool(before.per_type) != bool(after.per_type):
        return True
    return any(count > before.per_type.get(t, 0) for t, count in after.per_type.items())


def _unit(spec: EntitlementSpec) -> str:
    return "RRU" if spec.machines is None and not spec.per_type else "machines"
