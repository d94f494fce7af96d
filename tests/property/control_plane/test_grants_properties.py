"""Quotas are granted up to what a region has, and refused only beyond that."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.capacity import EntitlementSpec
from control_plane.portal.core.grants import (
    MachineClass,
    Promises,
    quota_left,
    shortage,
    unkept,
)
from control_plane.portal.core.pools import MICRO, HeldCapacity, Quota, pool_quotas
from control_plane.portal.core.raises import asks_for_more

TYPES = ["skylake", "icelake", "milan"]
COUNT = st.integers(1, 12)
SUPPLY = st.dictionaries(
    st.builds(
        MachineClass,
        st.sampled_from(TYPES),
        st.sampled_from(["dc1", "dc2"]),
        st.sampled_from([MICRO, 2 * MICRO]),
        st.sampled_from(["east", "west"]),
    ),
    st.integers(0, 12),
    min_size=1,
    max_size=5,
)


@st.composite
def counted(draw) -> EntitlementSpec:
    """A quota in machines: of any type, of some types, or by type with a bound for all."""
    types = draw(st.lists(st.sampled_from(TYPES), unique=True))
    place = {
        "datacenter": draw(st.sampled_from([None, None, "dc1"])),
        "region": draw(st.sampled_from([None, None, "west"])),
    }
    if not types or draw(st.booleans()):
        return EntitlementSpec(machines=draw(COUNT), machine_types=types, **place)
    per_type = {t: draw(COUNT) for t in types}
    most = draw(st.none() | st.integers(1, sum(per_type.values())))
    return EntitlementSpec(machines=most, per_type=per_type, **place)


def forced_into(quota: Quota, kinds: set[MachineClass], supply) -> int:
    """Return how many machines of these classes a quota needs if it gets all the other ones."""
    suited = {k for k in supply if quota.allows(k.machine_type, k.datacenter, k.region)}
    outside = {k.machine_type for k in suited - kinds}
    if not quota.per_type:
        return 0 if outside else quota.machines
    total = sum(quota.per_type.values())
    amount = total if quota.machines is None else min(quota.machines, total)
    return max(0, amount - sum(n for t, n in quota.per_type.items() if t in outside))


def can_all_be_served(specs, supply) -> bool:
    """Return whether Hall's condition holds for every set of classes."""
    return quotas_fit(pool_quotas(specs), supply)


def quotas_fit(quotas, supply) -> bool:
    kinds = list(supply)
    return all(
        sum(forced_into(quota, set(some), supply) for quota in quotas.values())
        <= sum(supply[k] for k in some)
        for size in range(len(kinds) + 1)
        for some in combinations(kinds, size)
    )


@pytest.mark.behaviour("CP1", "MO6")
@given(SUPPLY, st.lists(counted(), max_size=6))
def test_only_requests_that_violate_halls_theorem_are_refused(supply, wanted):
    specs = {f"e{i}": spec for i, spec in enumerate(wanted)}
    assert (not unkept(specs, supply)) == can_all_be_served(specs, supply)


REQUESTS = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | counted()), max_size=12)


@pytest.mark.behaviour("CP1", "CP7")
@given(SUPPLY, REQUESTS)
def test_no_sequence_of_accepted_requests_grants_more_than_there_is(supply, requests):
    """Each refusal is right too: with the refused request, some entitlement could not be served."""
    specs: dict[str, EntitlementSpec] = {}
    for name, wanted in requests:
        if wanted is None:
            specs.pop(name, None)
            continue
        if not asks_for_more(specs.get(name), wanted) or not shortage(name, wanted, specs, supply):
            specs[name] = wanted
        else:
            assert not can_all_be_served(specs | {name: wanted}, supply)
        assert can_all_be_served(specs, supply)


@given(SUPPLY, SUPPLY, REQUESTS)
def test_after_a_loss_of_machines_only_competing_requests_are_refused(before, after, requests):
    """A promise that cannot be kept affects no other entitlement. No growth makes it worse."""
    specs: dict[str, EntitlementSpec] = {}
    for name, wanted in requests:
        if wanted is not None and not shortage(name, wanted, specs, before):
            specs[name] = wanted
    lacking = _lacking(specs, after)
    for name, wanted in requests:
        grown = specs | {name: wanted} if wanted is not None else specs
        if wanted is not None and not shortage(name, wanted, specs, after) and name not in specs:
            assert _lacking(grown, after) == lacking


def _lacking(specs, supply) -> int:
    kinds = list(supply)
    return max(
        sum(forced_into(quota, set(some), supply) for quota in pool_quotas(specs).values())
        - sum(supply[k] for k in some)
        for size in range(len(kinds) + 1)
        for some in combinations(kinds, size)
    )


@pytest.mark.behaviour("CP7")
@given(SUPPLY, st.lists(counted(), max_size=4), st.data())
def test_machines_are_taken_so_that_all_other_quotas_can_still_be_met(supply, wanted, data):
    """Any order of allowed takes ends with every quota held in full."""
    specs: dict[str, EntitlementSpec] = {}
    for i, spec in enumerate(wanted):
        if not shortage(f"e{i}", spec, specs, supply):
            specs[f"e{i}"] = spec
    quotas, free = pool_quotas(specs), dict(supply)
    held: dict[str, dict[MachineClass, int]] = {pool: {} for pool in quotas}
    for _ in range(60):
        left = {pool: quota_left(quota, held[pool]) for pool, quota in quotas.items()}
        promises = Promises(left, free)
        allowed = {pool: promises.spare(pool) for pool in quotas}
        takes = sorted((pool, kind) for pool, kinds in allowed.items() for kind in kinds)
        if not takes:
            break
        pool, kind = data.draw(st.sampled_from(takes))
        held[pool][kind] = held[pool].get(kind, 0) + 1
        free[kind] -= 1
        after = {p: quota_left(quota, held[p]) for p, quota in quotas.items()}
        assert quotas_fit(after, free)
    else:
        return
    for pool, quota in quotas.items():
        total = sum(quota.per_type.values()) or 10**9
        assert sum(held[pool].values()) == min(total, quota.machines or total)


@pytest.mark.behaviour("CP7")
@given(SUPPLY, st.lists(counted(), min_size=1, max_size=4))
def test_a_refused_take_would_break_a_promise(supply, wanted):
    specs: dict[str, EntitlementSpec] = {}
    for i, spec in enumerate(wanted):
        if not shortage(f"e{i}", spec, specs, supply):
            specs[f"e{i}"] = spec
    quotas = pool_quotas(specs)
    promises = Promises(quotas, supply)
    for pool, quota in quotas.items():
        allowed = promises.spare(pool)
        for kind in supply:
            if supply[kind] and quota.allows(kind.machine_type, kind.datacenter, kind.region):
                after = quotas | {pool: quota_left(quota, {kind: 1})}
                assert (kind in allowed) == quotas_fit(after, supply | {kind: supply[kind] - 1})


RRU = st.integers(1, 40)


@pytest.mark.behaviour("MO6")
@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.lists(st.tuples(st.sampled_from(["a", "b", "ab"]), st.booleans(), RRU), max_size=5),
)
def test_rru_and_machines_are_weighed_against_each_other_exactly(counts, sizes, wanted):
    """Checked against linear duality on two classes: prices 1 and t, t at each point of change."""
    supply = {
        MachineClass(t, "dc1", size * MICRO): count
        for t, size, count in zip("ab", sizes, counts, strict=True)
    }
    specs = {
        f"e{i}": EntitlementSpec(
            machine_types=sorted(types),
            machines=None if in_rru else amount,
            rru=float(amount) if in_rru else None,
        )
        for i, (types, in_rru, amount) in enumerate(wanted)
    }

    def overpriced(prices: tuple[Fraction, Fraction]) -> bool:
        price = dict(zip("ab", prices, strict=True))
        size = dict(zip("ab", sizes, strict=True))
        needed = sum(
            amount * min(price[t] / (size[t] if in_rru else 1) for t in types)
            for types, in_rru, amount in wanted
        )
        return needed > sum(p * count for p, count in zip(prices, counts, strict=True))

    one, none = Fraction(1), Fraction(0)
    prices = [(one, none), (none, one), (one, one), (one, Fraction(sizes[1], sizes[0]))]
    assert bool(unkept(specs, supply)) == any(overpriced(p) for p in prices)


@pytest.mark.behaviour("CP3")
@given(counted(), st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 4)), max_size=30))
def test_no_more_is_held_than_the_quota_and_no_limit_is_missed(spec, offered):
    quota = pool_quotas({"e": spec})["e"]
    held: list[tuple[str, float]] = []
    for machine_type, rru in offered:
        within = _within(quota, [*held, (machine_type, float(rru))])
        after = HeldCapacity()
        for each in (*held, (machine_type, float(rru))):
            after.add(*each)
        allowed = quota.allows(machine_type, quota.datacenter or "dc1", quota.region or "west")
        assert (allowed and not quota.excess(after)) == within
        if within:
            held.append((machine_type, float(rru)))


def _within(quota: Quota, held: list[tuple[str, float]]) -> bool:
    by_type = {t: sum(1 for found, _ in held if found == t) for t, _ in held}
    return (
        (quota.machines is None or len(held) <= quota.machines)
        and all(quota.allows(t, quota.datacenter or "dc1", quota.region or "west") for t in by_type)
        and all(n <= quota.per_type.get(t, n) for t, n in by_type.items())
        and (quota.rru is None or sum(r for _, r in held) <= quota.rru)
    )
