"""The addresses to which a job may make the control plane connect, and those that are always
refused."""

import ssl

import pytest

from control_plane.api.jobs import ControllerRef
from control_plane.task_control.caller import ControllerCaller
from control_plane.task_control.core.addresses import AddressRules, address_rules
from taskcontrol.api import TaskControlRequest
from wire.errors import ConfigError, Forbidden

pytestmark = pytest.mark.behaviour("F-82")

OWN = ["cp.example", "192.168.7.1", "fd00::7"]


@pytest.mark.behaviour("F-82")
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "loopback"),
        ("127.8.9.10", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::7f00:1", "loopback"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("169.254.169.254", "link-local"),
        ("::ffff:169.254.169.254", "link-local"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("0.0.0.0", "reserved"),
        ("0.1.2.3", "reserved"),
        ("::", "reserved"),
        ("255.255.255.255", "reserved"),
        ("240.0.0.1", "reserved"),
        ("192.0.0.192", "reserved"),
        ("fec0::1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("192.168.7.1", "own"),
        ("::ffff:192.168.7.1", "own"),
        ("fd00::7", "own"),
        ("localhost", "not an address"),
        ("2130706433", "not an address"),
        ("0x7f.1", "not an address"),
    ],
)
def test_an_address_that_no_controller_may_have_is_refused(address: str, why: str) -> None:
    assert why in address_rules([], OWN).refusal(address)


@pytest.mark.parametrize("address", ["10.1.0.9", "192.168.7.2", "203.0.113.9", "fd00::8"])
def test_other_addresses_may_be_called(address: str) -> None:
    assert address_rules([], OWN).refusal(address) == ""


def test_networks_that_are_listed_are_the_only_ones() -> None:
    rules = address_rules(["10.1.0.0/16", "127.0.0.0/8"], OWN)
    assert rules.refusal("10.1.0.9") == ""
    assert rules.refusal("127.0.0.1") == ""
    assert rules.refusal("::ffff:10.1.0.9") == ""
    assert "controller_networks" in rules.refusal("10.2.0.9")
    assert "controller_networks" in rules.refusal("::1")
    with pytest.raises(ConfigError, match="has host bits set"):
        address_rules(["10.1.0.9/16"], OWN)


async def test_an_address_written_as_a_number_is_judged_before_a_connection_is_made():
    """No resolver is called for such an address, so the check of resolved names does not cover
    it."""
    call = ControllerCaller(ssl.create_default_context(), AddressRules())
    request = TaskControlRequest(job_handle="web", sequence_number=1, tasks=1, at=0.0)
    with pytest.raises(Forbidden, match=r"a controller at 127\.0\.0\.1 is not called"):
        await call(ControllerRef(url="https://127.0.0.1:1", name="db"), request)
