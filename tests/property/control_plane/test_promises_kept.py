"""What one pool may take at once leaves all others what they were promised (CP7)."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.grants import MachineClass, Promises, quota_left
from control_plane.core.pools import MICRO, Quota

KINDS = [
    MachineClass("a", "dc1", 2 * MICRO),
    MachineClass("a", "dc2", 2 * MICRO),
    MachineClass("b", "dc1", 3 * MICRO),
    MachineClass("c", "dc2", 5 * MICRO),
]
SUPPLIES = st.fixed_dictionaries({kind: st.integers(0, 4) for kind in KINDS})
DATACENTERS = st.sampled_from([None, None, "dc1", "dc2"])
QUOTAS = st.one_of(
    st.builds(
        Quota,
        machines=st.integers(1, 5),
        types=st.sampled_from([frozenset(), frozenset("a"), frozenset("ab"), frozenset("c")]),
        datacenter=DATACENTERS,
    ),
    st.builds(
        Quota,
        per_type=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
        datacenter=DATACENTERS,
    ),
)


@settings(deadline=None, max_examples=300)
@given(SUPPLIES, st.dictionaries(st.sampled_from("wxyz"), QUOTAS, min_size=2))
def test_taking_what_is_unpromised_makes_nobody_short(supply, quotas):
    pools = Promises(quotas, supply)
    kept = [pool for pool in quotas if pools.shortage(pool) is None]
    for pool in kept:
        for kind, count in pools.spare(pool).items():
            assert count <= supply[kind]
            taken = Counter[MachineClass]()
            while taken[kind] < count and allows(quotas[pool], taken, kind):
                taken[kind] += 1
            left = {**quotas, pool: quota_left(quotas[pool], taken)}
            after = Promises(left, Counter(supply) - taken)
            assert [p for p in kept if p != pool and after.shortage(p)] == []


def allows(quota: Quota, held: Counter[MachineClass], kind: MachineClass) -> bool:
    left = quota.left((k.machine_type, k.micro_rru / MICRO) for k in held.elements())
    return left.allows(kind.machine_type, kind.micro_rru / MICRO)
