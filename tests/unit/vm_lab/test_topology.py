from ipaddress import IPv4Address

import pytest

from vm_lab.errors import LabError
from vm_lab.topology import read_topology


def test_the_default_lab_spans_two_data_centers_and_three_msbs():
    machines = read_topology().first(3)
    assert [m.name for m in machines] == ["m1", "m2", "m3"]
    assert len({m.datacenter for m in machines}) == 2
    assert len({m.msb for m in machines}) == 3


def test_addresses_and_network_cards_follow_from_the_file():
    m1 = read_topology().get_machine("m1")
    assert m1.address == IPv4Address("10.77.0.11")
    assert m1.mac == "52:54:00:4d:00:0b"


def test_more_machines_than_listed_are_refused_with_the_number():
    with pytest.raises(LabError, match="lists 6"):
        read_topology().first(7)


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(LabError) as caught:
        read_topology().get_machine("m99")
    assert "m1 m2 m3" in caught.value.hint


def test_a_misspelt_field_is_named(tmp_path):
    file = tmp_path / "topology.toml"
    file.write_text(read_text().replace("datacenter =", "datacentre =", 1))
    with pytest.raises(LabError, match="datacentre"):
        read_topology(file)


def test_two_machines_with_one_address_are_refused(tmp_path):
    file = tmp_path / "topology.toml"
    file.write_text(read_text().replace("10.77.0.12", "10.77.0.11"))
    with pytest.raises(LabError, match="same name or address"):
        read_topology(file)


def test_an_address_outside_the_network_is_refused(tmp_path):
    file = tmp_path / "topology.toml"
    file.write_text(read_text().replace("10.77.0.12", "10.78.0.12"))
    with pytest.raises(LabError, match="m2"):
        read_topology(file)


def read_text() -> str:
    from vm_lab.topology import DEFAULT_FILE

    return DEFAULT_FILE.read_text()
