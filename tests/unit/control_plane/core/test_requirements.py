"""Requirements as users write them: what they mean, and all errors reported together."""

import runpy
from pathlib import Path

import pytest
from inventory import some_facts

from agent.api import Location
from control_plane.api.machines import Hardware, MachineRecord, MachineState
from control_plane.api.requirement_parser import parse, parse_with_errors
from control_plane.api.requirements import (
    FOR_LISTS,
    AllOf,
    AnyOf,
    Because,
    Compare,
    Exists,
    In,
    Maybe,
    Not,
    properties_of,
    text_of,
)
from control_plane.broker.core.matching import Listed, holds, may_hold
from wire.errors import InvalidInput

GIB = 1 << 30
MACHINE = MachineRecord(
    machine="m1",
    location=Location(region="prn", datacenter="dc1", msb="msb3", row="w2", rack="r7"),
    machine_type="gpu",
    hardware=Hardware(
        generation="skylake",
        sku="ai 8g",
        rru=40.0,
        cpus=32,
        memory_bytes=64 * GIB,
        gpus=8,
        gpu_type="h100",
        network_mbps=25_000,
    ),
    entitlement="ads",
    state=MachineState.DOWN,
    cluster="c9",
    labels={"disk": "nvme", "slots": "12"},
    facts=some_facts("m1", cpus=32, memory_bytes=64 * GIB, capabilities=["btrfs", "systemd-257"]),
)
HERE = Listed.of(MACHINE)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("rack = r1", In("rack", frozenset({"r1"}))),
        ("rack != r1", Not(In("rack", frozenset({"r1"})))),
        ("rack in (r1, dc1/msb3/w2/r7)", In("rack", frozenset({"r1", "dc1/msb3/w2/r7"}))),
        ("rack not in (r1)", Not(In("rack", frozenset({"r1"})))),
        ('sku = "ai 8g"', In("sku", frozenset({"ai 8g"}))),
        (r'sku = "a \" b \\ c"', In("sku", frozenset({'a " b \\ c'}))),
        ('sku = "and"', In("sku", frozenset({"and"}))),
        ("memory >= 64GiB", Compare("memory", ">=", 64.0 * GIB)),
        ("cpus<32", Compare("cpus", "<", 32.0)),
        ("gpus in (4, 8)", AnyOf((Compare("gpus", "=", 4.0), Compare("gpus", "=", 8.0)))),
        ("gpus != 4", Not(Compare("gpus", "=", 4.0))),
        ("label.disk exists", Exists("label.disk")),
        ("label.disk not exists", Not(Exists("label.disk"))),
        ("label.slots = 12", In("label.slots", frozenset({"12"}))),
        ("label.slots > 8", Compare("label.slots", ">", 8.0)),
        ("capability.own-init exists", Exists("capability.own-init")),
        (
            'machine not in (m1, m2) because "disk errors, \\"see\\" 7"',
            Because(Not(In("machine", frozenset({"m1", "m2"}))), 'disk errors, "see" 7'),
        ),
        ("not gpus exists", Not(Exists("gpus"))),
        (
            "msb = a or gpus exists and not (rack = r or cpus > 1)",
            AnyOf(
                (
                    In("msb", frozenset({"a"})),
                    AllOf(
                        (
                            Exists("gpus"),
                            Not(AnyOf((In("rack", frozenset("r")), Compare("cpus", ">", 1.0)))),
                        )
                    ),
                )
            ),
        ),
    ],
)
def test_a_text_means_one_thing_and_is_written_so_that_it_reads_back(text, term):
    assert parse(text) == term
    assert parse(text_of(term)) == term


@pytest.mark.parametrize(
    ("text", "meets"),
    [
        ("msb = msb3", True),
        ("msb = dc1/msb3", True),
        ("msb = dc2/msb3", False),
        ("rack in (r7, r8)", True),
        ("row = r7", False),
        ("machine = m1 and machine_type != small", True),
        ("generation in (skylake, icelake) and gpu_type exists", True),
        ("memory > 64GiB", False),  # memory that the host needs is not available to tasks
        ("memory > 57GiB", True),
        ("gpus > 8", False),
        ("gpus >= 8", True),
        ("gpus < 8 or cpus <= 32", True),
        ("gpus in (4, 8)", True),
        ("gpus not in (4, 8)", False),
        ("rru = 40", True),
        ("power_w exists", False),
        ("label.disk = nvme", True),
        ("label.disk in (ssd, hdd)", False),
        ("label.slots >= 12", True),
        ("label.disk > 1", False),  # not a number
        ("label.other exists", False),
        ("label.other not in (a)", True),  # a missing label is none of the values
        ("label.other != a", True),
        ("label.other < 5 or label.other >= 5", False),
        ("not label.other > 5", True),
        ("capability.btrfs exists", True),
        ("capability.own-init not exists", True),
        ('machine = m1 because "licence"', True),
        ("state = down and entitlement = ads and cluster = c9", True),
        ("profile exists", False),
        ("not (state = up or entitlement != ads)", True),
    ],
)
def test_a_machine_meets_a_requirement(text, meets):
    assert holds(parse(text, FOR_LISTS), HERE) is meets


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("", ["it is empty; write a requirement such as gpus >= 1"]),
        ("rak = r1", ["at character 1: 'rak' is not a property; did you mean rack?"]),
        ("gpus > many", ["at character 8: gpus is compared with a number, not 'many'"]),
        ("memory > 64GB", ["GB is ambiguous (1000 or 1024)"]),
        ("rack > r1", ["at character 6: rack is a word without an order: use =, !=, in"]),
        ("rack", ["at character 5: after `rack` an operator is expected (=, !=, "]),
        ("rack == r1", ["at character 6: write = instead of =="]),
        ("rack = ", ["at character 8: a value is expected, not the end"]),
        ("rack in r1", ["at character 9: in needs a list in parentheses, as in (a, b)"]),
        ("rack in (r1 r2)", ["at character 13: a comma or ) is expected in the list, not 'r2'"]),
        ("rack in ()", ["at character 10: a value is expected, not ')'"]),
        ('rack = ""', ["the word is empty; for an absent property use not exists"]),
        ('rack = "r1', ["at character 8: the quotation mark is not closed"]),
        ("rack = and", ["a value is expected, not 'and'; put it in quotation marks"]),
        ("(rack = r1", ["the ( at character 1 is not closed"]),
        ("rack = r1)", ["at character 10: this ) has no opening parenthesis; remove it"]),
        ("rack = r1 msb = m", ["at character 11: 'msb' has no operand; join requirements by and"]),
        ("rack ~ r1", ["at character 6: '~' has no meaning here"]),
        ("rack not = r1", ["after `rack not`, in or exists is expected, not '='"]),
        ("label.A = b", ["'label.A' is not a label: label. and up to 63 of a-z"]),
        ("capability.Nspawn exists", ["'capability.Nspawn' is not a capability"]),
        ("capability.x = yes", ["capability.x is present or absent: use exists or not exists"]),
        ("state = up", ["state changes while tasks run: only `machine list --where`"]),
        ("rack = r because so", ["a reason in quotation marks is expected, not 'so'"]),
        ('(rack = r because "x")', ["the ( at character 1 is not closed"]),
        ('rack = r because " "', ["a reason in quotation marks is expected"]),
        ('because "x"', ["at character 1: a property is expected, not 'because'"]),
        (
            'rak = r because "x" or gpus = x',
            ["'rak' is not a property", "'or' has no operand", "'x'"],
        ),
        ("=", ["at character 1: a property is expected, not '='"]),
        (
            "rak = r1 and gpus > many or (memory < 1 and color = red) and rack in (a, b",
            [
                "at character 1: 'rak' is not a property",
                "at character 21: gpus is compared with a number, not 'many'",
                "at character 45: 'color' is not a property",
                "at character 75: a comma or ) is expected in the list, not the end",
            ],
        ),
    ],
)
def test_every_error_is_reported_with_its_place_and_a_hint(text, reasons):
    _, errors = parse_with_errors(text)
    assert len(errors) >= len(reasons)
    for reason in reasons:
        assert any(reason in error for error in errors), errors
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert all(error in str(caught.value) for error in errors)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "gpus = 1" + " and gpus = 1" * 200,  # too long
        " or ".join(["a=b"] * 201),
        "not " * 17 + "a=b",
        "(" * 400 + "a=b" + ")" * 400,
        "(" * 1000,
        "not " * 499,
    ],
)
def test_endless_input_is_refused_at_no_cost(text):
    _, errors = parse_with_errors(text)
    assert errors


def test_unknown_properties_of_a_group_exclude_no_machine():
    known = frozenset({"msb", "gpus"})

    def may(text: str) -> bool:
        return may_hold(parse(text), HERE, known)

    assert may("rack = nowhere")
    assert may("not rack = r7")
    assert not may("msb = nowhere and rack = nowhere")
    assert may("msb = nowhere or rack = nowhere")
    assert not may("msb = nowhere or gpus = 1")
    assert may("not (msb = msb3 and rack = r7)")
    assert not may("not (msb = msb3 or rack = r7)")
    maybe = Maybe(parse("msb = msb3 and rack = nowhere"), known)
    assert holds(maybe, HERE)
    assert text_of(maybe) == "msb = msb3 and rack = nowhere"


def test_which_properties_a_requirement_asks_for():
    found_properties = properties_of(
        parse("not (msb = b or gpus > 1) and label.x exists or rack in (r)")
    )
    assert found_properties == {"msb", "gpus", "label.x", "rack"}


def test_the_reference_is_what_the_parser_knows():
    tool = runpy.run_path(str(Path(__file__).parents[4] / "tools/requirements-grammar"))
    assert tool["PAGE"].read_text() == tool["page"](), "run tools/requirements-grammar"
