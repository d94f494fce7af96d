"""The unit of a task whose owner asks for more than the sandbox allows."""

from __future__ import annotations

import itertools

import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Network, NetworkMode, Relaxation
from agent.api.relaxations import EXPOSURE, RAW_EXPOSURE, exposure_of
from agent.machine.unit_properties import encode
from agent.runtime.core.records import key_of
from agent.tasks.core.unit_properties import NO_PRIORITY, TASK_HARDENING, unit_properties

NETWORKS = (Network(), Network(unix_sockets=True), Network(mode=NetworkMode.PRIVATE))
WHOLE = (Relaxation.RAW, Relaxation.OWN_INIT, Relaxation.NESTED)
"""Relaxations that need a different unit; for the last two see test_own_init_of_a_task."""
SETS = st.sets(st.sampled_from(Relaxation))


def properties(*relaxations: Relaxation, network: Network = NETWORKS[0]) -> dict[str, object]:
    spec = a_spec(relaxations=list(relaxations), network=network)
    return unit_properties("web", spec, "/r")


@pytest.mark.behaviour("AG8", "F-83")
def test_each_relaxation_changes_its_own_property_and_nothing_else() -> None:
    before = properties()
    found = {
        name: {k for k in {*before, *after} if before.get(k) != after.get(k)}
        for name, after in ((r, properties(r)) for r in Relaxation if r not in WHOLE)
    }
    assert {name: keys - {"Description"} for name, keys in found.items()} == {
        Relaxation.PROC: {"ProcSubset", "ReadOnlyPaths", "ProtectKernelTunables"},
        Relaxation.NETLINK: {"RestrictAddressFamilies"},
        Relaxation.SCHEDULING: {"SystemCallFilter"},
        Relaxation.DEBUG: {"SystemCallFilter"},
    }
    calls = properties(Relaxation.SCHEDULING, Relaxation.DEBUG)["SystemCallFilter"]
    assert set(before["SystemCallFilter"]) - set(calls) == {  # type: ignore[call-overload]
        *("~@resources", NO_PRIORITY, "~@debug")
    }


def test_a_task_lists_the_interfaces_of_a_network_that_is_its_own() -> None:
    """In the host's network the interfaces are shared by all, so listing them is a relaxation."""
    families = [properties(network=n)["RestrictAddressFamilies"] for n in NETWORKS]
    assert ["AF_NETLINK" in words for words in families] == [False, False, True]  # type: ignore[operator]
    requested = properties(Relaxation.NETLINK, network=NETWORKS[2])["RestrictAddressFamilies"]
    assert requested == families[2]


@pytest.mark.behaviour("F-83")
def test_raw_is_root_without_a_sandbox_and_still_this_tasks_ports_network_and_limits() -> None:
    """Memory, slice, ports and namespace stay, because they are not part of the sandbox."""
    before = properties()
    found = properties(Relaxation.RAW)

    assert found["User"] == "root"
    assert not {*TASK_HARDENING} - {"IPAddressDeny"} & {*found}
    for name in ("MemoryMax", "Slice", "BPFProgram", "RootDirectory"):
        assert found[name] == before[name]
    private = properties(Relaxation.RAW, network=NETWORKS[2])
    assert private["NetworkNamespacePath"] == "/run/twine/netns/web"
    assert encode(found)


@pytest.mark.behaviour("AG8")
@given(relaxations=SETS, network=st.sampled_from(NETWORKS))
def test_only_raw_removes_the_protection_of_the_host(
    relaxations: set[Relaxation], network: Network
) -> None:
    """No combination of the small ones gives capabilities, devices, mounts or another user."""
    small = relaxations - {Relaxation.RAW}
    found, before = properties(*small, network=network), properties(network=network)
    changed = {"ProcSubset", "ReadOnlyPaths", "RestrictAddressFamilies", "SystemCallFilter"}
    for name in {*TASK_HARDENING} - changed:
        assert found[name] == before[name]
    read_only = found["ReadOnlyPaths"]
    assert isinstance(read_only, tuple)
    assert read_only == ("-+/sys",) or "-+/sys/kernel" in read_only
    assert found["ProcSubset"] == "pid" or found["ProtectKernelTunables"] is True
    assert found["User"] == before["User"]
    for call in ("~@mount", "~@module", "~@privileged", "~@raw-io", "~@reboot", "~@swap"):
        assert call in found["SystemCallFilter"]  # type: ignore[operator]


@given(relaxations=SETS)
def test_a_relaxation_never_costs_less_than_none(relaxations: set[Relaxation]) -> None:
    # it sets one property more than a task without relaxations
    alike = relaxations & {Relaxation.PROC}
    assert 0 < exposure_of(alike) <= exposure_of(relaxations) <= 10
    if Relaxation.RAW in relaxations:
        assert exposure_of(relaxations) > 9


def test_the_price_of_a_mixture_is_found_at_its_place() -> None:
    """The index in the table is a sum; a wrong sum would give another combination's exposure."""
    weights = {Relaxation.PROC: 1, Relaxation.NETLINK: 2}
    weights |= {Relaxation.SCHEDULING: 4, Relaxation.DEBUG: 8}
    sets = [s for n in range(5) for s in itertools.combinations(weights, n)]
    assert len(sets) == len(EXPOSURE)
    for names in sets:
        assert exposure_of(names) == EXPOSURE[sum(weights[n] for n in names)]
    assert exposure_of(Relaxation) == RAW_EXPOSURE


@pytest.mark.behaviour("F-05")
@pytest.mark.parametrize("name", Relaxation)
def test_another_sandbox_is_another_process_and_none_changes_no_key(name: Relaxation) -> None:
    """A task without relaxations keeps the key that an earlier agent gave it."""
    assert key_of(a_spec(relaxations=[name])) != key_of(a_spec())
    assert key_of(a_spec(relaxations=[name, name])) == key_of(a_spec(relaxations=[name]))
    assert properties() == unit_properties("web", a_spec(relaxations=[]), "/r")
