"""One root of the authority replaces another: the steps, and which hosts each step would lock
out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.authority import HostTrust, Step
from control_plane.api.people import IssuedCredential
from control_plane.identity.authority import CertificateAuthority
from control_plane.identity.core.roots import (
    Root,
    Roots,
    is_behind,
    lockouts,
    new_root,
    parse_roots,
    roots_after,
    roots_file,
)
from control_plane.identity.rotation import Rotation
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from tests.faulty_store import MADE, UNANSWERED, FaultyStore
from wire.errors import Conflict, UnknownOutcome

A, B, C = (new_root("twine", 1_700_000_000.0) for _ in range(3))
POOL = (A, B, C)


def a_credential(name: str, issuer: str, *trusts: str) -> IssuedCredential:
    return IssuedCredential(
        name=name, issued_at=1.0, not_after=2.0, issuer=issuer, trusts=list(trusts)
    )


@pytest.mark.behaviour("BUG-AG5")
@given(st.lists(st.sampled_from(Step), max_size=12))
def test_operators_always_leave_one_issuing_root_and_at_most_one_other(
    steps: list[Step],
) -> None:
    """The stored text reads back as the same roots, and the former root has no key."""
    roots, fresh = Roots(A), [C, B] * 6
    for step in steps:
        try:
            roots = roots_after(roots, step, fresh.pop())
        except Conflict:
            continue
        assert roots.active.key is not None
        assert len(roots.trusted()) <= 2
        assert roots.former is None or roots.former.key is None
        read = parse_roots(roots_file(roots))
        assert read.bundle() == roots.bundle()
        assert [r.key is None for r in read.trusted()] == [r.key is None for r in roots.trusted()]


@pytest.mark.behaviour("BUG-AG5")
def test_a_rotation_is_three_steps_in_order() -> None:
    """The new root is trusted before it issues, and the old one after it has issued."""
    roots = roots_after(Roots(A), Step.PREPARE, B)
    assert [r.ca_hash for r in roots.trusted()] == [A.ca_hash, B.ca_hash]
    roots = roots_after(roots, Step.ACTIVATE, C)
    assert [r.ca_hash for r in roots.trusted()] == [B.ca_hash, A.ca_hash]
    with pytest.raises(Conflict, match="former root is still trusted"):
        roots_after(roots, Step.PREPARE, C)
    roots = roots_after(roots, Step.RETIRE, C)
    assert [r.ca_hash for r in roots.trusted()] == [B.ca_hash]


@pytest.mark.parametrize("step", [Step.ACTIVATE, Step.RETIRE, Step.ABANDON])
def test_no_step_is_taken_before_its_turn(step: Step) -> None:
    with pytest.raises(Conflict):
        roots_after(Roots(A), step, B)


@pytest.mark.behaviour("BUG-AG5")
def test_a_host_without_the_new_root_blocks_the_exchange() -> None:
    """The refusal lists hosts by number and name, and files that no component renews."""
    roots = Roots(A, coming=B)
    knows = HostTrust(trusts=[A.ca_hash, B.ca_hash], issuer=A.ca_hash)
    old = HostTrust(trusts=[A.ca_hash], issuer=A.ca_hash)
    hosts = {"vm1": knows, "vm2": old, "vm3": None}
    assert lockouts(roots, Step.ACTIVATE, {"vm1": knows}, []) == []
    assert lockouts(roots, Step.ACTIVATE, hosts, [a_credential("ann", A.ca_hash, A.ca_hash)]) == [
        "2 hosts do not know the new root yet: vm2, vm3",
        "the credential of user ann was created before it",
    ]
    assert lockouts(roots, Step.ABANDON, hosts, []) == []


@pytest.mark.behaviour("BUG-AG5")
def test_a_holder_of_the_former_root_blocks_its_end() -> None:
    """A long list is cut."""
    roots = Roots(B, former=A)
    both = [A.ca_hash, B.ca_hash]
    hosts = {f"vm{n}": HostTrust(trusts=both, issuer=A.ca_hash) for n in range(5)}
    hosts["new"] = HostTrust(trusts=both, issuer=B.ca_hash)
    found = lockouts(roots, Step.RETIRE, hosts, [a_credential("ann", B.ca_hash, *both)])
    assert found == [
        "5 hosts have a certificate of the former root: vm0, vm1, vm2 and 2 more",
    ]


@pytest.mark.behaviour("BUG-AG5")
@given(st.sampled_from(POOL), st.sets(st.sampled_from(POOL)))
def test_a_host_is_behind_until_it_trusts_exactly_what_there_is_and_is_of_the_active_root(
    issuer: Root, trusted: set[Root]
) -> None:
    """A host that still trusts a retired root has to renew as well."""
    roots = Roots(A, former=B)
    trust = HostTrust(trusts=[r.ca_hash for r in trusted], issuer=issuer.ca_hash)
    ready = trusted == {A, B} and issuer is A
    assert is_behind(roots, trust) != ready
    assert is_behind(roots, None)


def test_a_file_of_an_earlier_release_is_one_root() -> None:
    """Such a file has one key and its certificate."""
    read = parse_roots(roots_file(Roots(A)))
    assert (read.active.ca_hash, read.coming, read.former) == (A.ca_hash, None, None)


@pytest.mark.parametrize("text", [b"", b"nonsense", A.pem.encode(), roots_file(Roots(A)) * 3])
def test_a_damaged_file_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="the key of the certificate is missing"):
        parse_roots(text)


@pytest.mark.behaviour("BUG-CP149")
async def test_the_roots_of_a_host_are_recorded_after_a_write_without_an_answer() -> None:
    """Formerly each later renewal of the host was a conflict, so it counted as behind forever."""
    outcomes = [UNANSWERED, MADE]
    async with MemoryStore() as inner:
        store = FaultyStore(inner, lambda _: outcomes.pop(0))
        authority = CertificateAuthority(Roots(A), "twine")
        rotation = Rotation(store, authority, Runtime())
        rotation.hosts = lambda: ["vm1"]
        with pytest.raises(UnknownOutcome):
            await rotation.record_trust("vm1", ["old"])
        await rotation.record_trust("vm1", [A.ca_hash])
        (root,) = (await rotation.view()).roots
        assert root.trusted_by == 1
