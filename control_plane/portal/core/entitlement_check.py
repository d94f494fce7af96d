"""Checks an entitlement against this region; reports all errors at once, each with its field.

Machine types and places that were granted once stay valid, so a quota can be made smaller after
the last machine of its type has left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from control_plane.api.capacity import EntitlementSpec
from control_plane.portal.core.grants import Supply
from control_plane.portal.core.pools import members
from wire.errors import FieldError

_QUOTA_KINDS = ("machines", "per_type", "rru")


def check_entitlement(
    name: str,
    wanted: EntitlementSpec,
    specs: Mapping[str, EntitlementSpec],
    supply: Supply,
    profiles: Collection[str] = (),
) -> tuple[FieldError, ...]:
    """Return every reason to refuse the specification, except the size of its quota.

    In a region without machines, types are not checked. `profiles` are the host profiles that are
    installed on machines; none: the name is not checked.
    """
    known = specs.get(name)
    found = [*_place_errors(wanted, known, supply), *_profile_errors(wanted, known, profiles)]
    if wanted.materialization is not None:
        found += _reservation_errors(name, wanted, wanted.materialization, specs)
    else:
        found += _pool_errors(name, wanted, specs)
    return tuple(found)


def fixed_by_jobs(
    known: EntitlementSpec | None, wanted: EntitlementSpec, jobs: Sequence[str]
) -> tuple[FieldError, ...]:
    """Return the changes that must wait until these jobs of the entitlement are stopped.

    All machines of an entitlement run one profile (MO11). Tasks do not move when their entitlement
    goes to another pseudo cluster.
    """
    if known is None or not jobs:
        return ()
    return tuple(
        _error(
            field,
            f"cannot be changed from {getattr(known, field)!r} to {getattr(wanted, field)!r}"
            f" while jobs run on its machines: {', '.join(jobs[:10])}",
        )
        for field in ("host_profile", "materialization")
        if getattr(known, field) != getattr(wanted, field)
    )


def _place_errors(
    wanted: EntitlementSpec, known: EntitlementSpec | None, supply: Supply
) -> list[FieldError]:
    if not supply:
        return []
    types = {kind.machine_type for kind in supply}
    datacenters = {kind.datacenter for kind in supply}
    old_types = {*known.machine_types, *known.per_type} if known else set()
    found = []
    for field in ("machine_types", "per_type"):
        for missing in sorted(set(getattr(wanted, field)) - types - old_types):
            has = ", ".join(sorted(types))
            found.append(
                _error(field, f"the region has no machines of type {missing}; it has: {has}")
            )
    pin = wanted.datacenter
    if pin is not None and pin not in datacenters and (known is None or known.datacenter != pin):
        has = ", ".join(sorted(datacenters))
        found.append(_error("datacenter", f"the region has no data center {pin}; it has: {has}"))
    pin, regions = wanted.region, {kind.region for kind in supply}
    if pin is not None and pin not in regions and (known is None or known.region != pin):
        has = ", ".join(sorted(regions))
        found.append(_error("region", f"no machine is in region {pin}; machines are in: {has}"))
    return found


def _profile_errors(
    wanted: EntitlementSpec, known: EntitlementSpec | None, profiles: Collection[str]
) -> list[FieldError]:
    """Check the name of the host profile; a reservation has that of its materialization."""
    profile = wanted.host_profile
    is_kept = known is not None and known.host_profile == profile
    if not profiles or profile in profiles or is_kept or wanted.materialization is not None:
        return []
    has = ", ".join(sorted(profiles))
    return [_error("host_profile", f"no machine has a host profile {profile!r}; they have: {has}")]


def _reservation_errors(
    name: str, wanted: EntitlementSpec, base_name: str, specs: Mapping[str, EntitlementSpec]
) -> list[FieldError]:
    """Check a reservation against the pseudo cluster on which it stacks (MO16).

    The pool holds machines up to the sum of their quotas, so all quotas must be of one kind and for
    the same machines. `scheduler.core.shares` bounds the tasks of each entitlement's jobs.
    """
    base = specs.get(base_name)
    if base_name == name:
        return [_error("materialization", "an entitlement cannot stack on itself")]
    if base is None:
        return [_error("materialization", f"there is no entitlement {base_name!r}")]
    if base.materialization is not None:
        return [
            _error(
                "materialization",
                f"{base_name!r} is itself a reservation, on {base.materialization!r}",
            )
        ]
    found = []
    if stacked := [n for n, s in specs.items() if s.materialization == name]:
        listed = ", ".join(sorted(stacked)[:10])
        found.append(_error("materialization", f"reservations stack on {name!r} itself: {listed}"))
    if wanted.host_profile != base.host_profile:
        reason = f"the machines of {base_name!r} run {base.host_profile!r}"
        found.append(_error("host_profile", reason))
    if _quota_kinds(wanted) != _quota_kinds(base):
        given = " and ".join(_quota_kinds(base))
        found.append(_error("machines", f"the quota of {base_name!r} is given by {given}"))
    if wanted.machine_types and set(wanted.machine_types) != set(base.machine_types):
        types = ", ".join(base.machine_types) or "any"
        reason = f"its machine types must be those of {base_name!r}: {types}"
        found.append(_error("machine_types", reason))
    if base.machine_types and (others := set(wanted.per_type) - set(base.machine_types)):
        listed = ", ".join(sorted(others))
        found.append(_error("per_type", f"{base_name!r} has no machines of type {listed}"))
    for field, level in (("datacenter", "data center"), ("region", "region")):
        pin = getattr(base, field)
        if getattr(wanted, field) not in (None, pin):
            where = pin or f"not pinned to a {level}"
            found.append(_error(field, f"its machines must be those of {base_name!r}: {where}"))
    return found


def _pool_errors(
    name: str, wanted: EntitlementSpec, specs: Mapping[str, EntitlementSpec]
) -> list[FieldError]:
    """Check that the reservations on an entitlement stay valid when it changes."""
    found: list[FieldError] = []
    for other in members({**specs, name: wanted}).get(name, [])[1:]:
        errors = _reservation_errors(other, specs[other], name, {**specs, name: wanted})
        found += [
            _error(e.field, f"the reservation {other!r} would not fit any more: {e.reason}")
            for e in errors
        ]
    return found


def _quota_kinds(spec: EntitlementSpec) -> list[str]:
    return [kind for kind in _QUOTA_KINDS if getattr(spec, kind) not in (None, {})]


def _error(field: str, reason: str) -> FieldError:
    return FieldError(field=field, reason=reason)
