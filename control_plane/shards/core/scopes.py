"""Which entitlements a shard may own: those of one region, or any (SH13, docs/adr/0223).

A *regional* shard has a region and owns the entitlements that are pinned to it, no others. A
*global* shard has none, and may own any entitlement. Shard 0 is global, so there is always one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from control_plane.api.ownership import ShardLoad
from wire.errors import ConfigError, Conflict


def may_own(scope: str, region: str | None) -> bool:
    """Return whether a shard may own an entitlement with this pin; an empty scope is global."""
    return scope in ("", region)


def scope_text(scope: str) -> str:
    """Describe the scope of a shard."""
    return f"region {scope}" if scope else "global"


def least_loaded_first(loads: Sequence[ShardLoad], region: str | None = None) -> list[int]:
    """Return the shards that may own an entitlement with this pin, the best one first.

    Shards of its region come before global ones, then those with the least load, then those with
    the fewest jobs.
    """
    candidates = [load for load in loads if may_own(load.region, region)]
    candidates.sort(key=lambda load: (not load.region, load.load, load.jobs, load.shard))
    return [load.shard for load in candidates]


def best_of_each_scope(loads: Sequence[ShardLoad], region: str | None = None) -> list[int]:
    """Return the best regional shard and then the best global one that may own an entitlement."""
    scope_of = {load.shard: load.region for load in loads}
    best = dict[str, int]()
    for shard in least_loaded_first(loads, region):
        best.setdefault(scope_of[shard], shard)
    return [*best.values()]


def check_move(
    entitlement: str, region: str | None, shard: int, scope: str, held: Mapping[str, str]
) -> None:
    """Raise `Conflict` if a shard may not get an entitlement.

    `held` are the regions of its machines. Tasks stay where they are when a pin changes, so an
    entitlement may still have machines elsewhere.
    """
    if may_own(scope, region):
        if outside := sorted(name for name, at in held.items() if not may_own(scope, at)):
            raise Conflict(
                f"cannot give entitlement {entitlement!r} to shard {shard}: that shard is for "
                f"region {scope}, and the entitlement still holds {len(outside)} machines "
                f"elsewhere: {', '.join(outside[:10])}",
                hint="twinectl machine drain moves the tasks of a machine; once it is empty, it is "
                "given back",
            )
        return
    raise Conflict(
        f"cannot give entitlement {entitlement!r} to shard {shard}: that shard is for region "
        f"{scope}, and the entitlement is {_pinned(region)}",
        hint=f"pin it first: twinectl entitlement update {entitlement} --region {scope}; or move "
        "it to a shard that `twinectl shard list` shows as global",
    )


def check_pin(
    entitlement: str, region: str | None, shard: int, scope: str, *, may_move: bool = True
) -> None:
    """Raise `Conflict` if the shard of an entitlement may not keep it once it has this pin.

    `may_move` is false for an entitlement without machines of its own: it cannot move before.
    """
    if may_own(scope, region):
        return
    first = "" if may_move else f"give it its own machines with --region {scope}; then "
    what = f"pin entitlement {entitlement!r} to region {region}"
    raise Conflict(
        f"cannot {what if region else f'leave entitlement {entitlement!r} without a region'}: "
        f"shard {shard} owns it, which is for region {scope}",
        hint=f"{first}twinectl shard move {entitlement} --to 0; then change its region",
    )


def check_owners(
    owners: Mapping[str, int], pins: Mapping[str, str | None], scope_of: Callable[[int], str]
) -> None:
    """Raise `ConfigError` if shards own entitlements that their scopes exclude.

    `owners` are the shards by entitlement, `pins` the regions to which entitlements are pinned.
    """
    wrong = sorted(name for name, n in owners.items() if not may_own(scope_of(n), pins.get(name)))
    if not wrong:
        return
    first = wrong[0]
    shard, pin = owners[first], _pinned(pins.get(first))
    raise ConfigError(
        f"cannot run with these scheduler.shard_regions: {len(wrong)} entitlements are in a shard "
        f"of another region; {first!r} in shard {shard} is {pin}, and the shard is for region "
        f"{scope_of(shard)}",
        hint=f"start with the regions from before, and move them: twinectl shard move {first} "
        "--to 0; then start with these",
    )


def unmovable(load: ShardLoad, others: Sequence[ShardLoad]) -> list[str]:
    """Return the entitlements of a shard that none of the others may own."""
    return [
        name for name in load.entitlements if not least_loaded_first(others, load.pinned.get(name))
    ]


def _pinned(region: str | None) -> str:
    return f"pinned to region {region}" if region else "not pinned to a region"
