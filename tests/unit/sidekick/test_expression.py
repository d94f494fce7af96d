"""Expressions of facts: their values, and all invalid expressions."""

from __future__ import annotations

import pytest

from sidekick.expression import (
    MAX_DEPTH,
    MAX_LIST,
    MAX_TEXT,
    ExpressionError,
    Fact,
    Value,
    parse,
)

FACTS: dict[str, Fact] = {
    "cpu.count": 36,
    "cpu.vendor": "intel",
    "disk.names": ["sda", "nvme0n1"],
    "host.virtual": False,
    "kernel.version": [6, 12],
    "memory.total_bytes": 64 << 30,
    "nic.speed_mbps": 0,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 - -4", 11),
        ("(1 + 2) * 3", 9),
        ("7 // 2 + 7 % 2", 4),
        ("-7 // 2", -4),
        ("7 / 2", 3.5),
        ("16KiB", 16384),
        ("1.5GiB", 3 << 29),
        ("min(memory.total_bytes // 20, 256MiB)", 256 << 20),
        ("max([1, cpu.count])", 36),
        ("clamp(cpu.count, 1, 23)", 23),
        ("floor(cpu.count * 0.4) + ceil(0.1)", 15),
        ("'a' if host.virtual else 'b' if cpu.count > 100 else 'c'", "c"),
        ("kernel.version >= [6, 1]", True),
        ("kernel.version < [6, 2]", False),
        ("cpu.vendor in ['intel', \"amd\"] and not host.virtual", True),
        ("'nvme0n1' in disk.names", True),
        ("host.virtual or cpu.vendor == 'amd'", False),
        ("host.virtual and 1 // 0 == 1", False),
        ("[4096, cpu.count, 'x', true]", [4096, 36, "x", True]),
        ("1 == 1.0 and 'a' != 1", True),
    ],
)
def test_an_expression_has_its_value(text: str, value: Value) -> None:
    assert parse(text).evaluate(FACTS) == value
    assert type(parse(text).evaluate(FACTS)) is type(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a value was expected before its end"),
        ("1 +", "a value was expected before its end"),
        ("1 2", "'2' is unexpected"),
        ("(1", "')' was expected before its end"),
        ("[1, 2", "',' was expected before its end"),
        ("1 if true", "'else' was expected"),
        ("1 < 2 < 3", "'<' is unexpected"),
        ("__import__('os')", "there is no function '__import__'"),
        ("cpu.count.bit_length()", "there is no function 'cpu.count.bit_length'"),
        ("{1}", "cannot read '{1}'"),
        ("1 ; 2", "cannot read '; 2'"),
        ("'it", 'cannot read "\'it"'),
        ("1 ** 2", "a value was expected before '*'"),
        ("2MB", "cannot read '2MB'"),
        ("lambda: 1", "cannot read ': 1'"),
        ("1" * 30, "a number is beyond 64 bits"),
        ("9" * 400 + ".0", "a number is beyond 64 bits"),
        ("1" * (MAX_TEXT + 1), f"at most {MAX_TEXT} characters"),
        ("(" * (MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH}"),
        ("not " * (MAX_DEPTH + 1) + "true", f"nested deeper than {MAX_DEPTH}"),
        ("-" * (MAX_DEPTH + 1) + "1", f"nested deeper than {MAX_DEPTH}"),
        ("[" + "1," * (MAX_LIST + 1) + "1]", f"at most {MAX_LIST} members"),
    ],
)
def test_an_invalid_expression_is_refused(text: str, why: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cpu.cuont", "there is no fact cpu.cuont"),
        ("1 // nic.speed_mbps", "division by zero"),
        ("1 % 0", "division by zero"),
        ("'a' * 3", "* computes with numbers, not with 'a'"),
        ("'a' + 'b'", "+ computes with numbers, not with 'a'"),
        ("true + 1", "+ computes with numbers, not with True"),
        ("1 < 'a'", "1 and 'a' cannot be compared"),
        ("true < false", "True and False cannot be compared"),
        ("[1] < ['a']", "[1] and ['a'] cannot be compared"),
        ("1 in 2", "`in` needs a list"),
        ("not 1", "1 is neither true nor false"),
        ("1 if 'x' else 2", "'x' is neither true nor false"),
        ("min()", "min takes at least 1"),
        ("floor(1, 2)", "floor takes 1"),
        ("9000000000000000000 + 9000000000000000000", "a number is beyond 64 bits"),
        ("9000000000000000000 * 1000000000.5", "a number is beyond 64 bits"),
    ],
)
def test_a_missing_value_has_a_reason(text: str, why: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text).evaluate(FACTS)
    assert why in str(caught.value)
    assert text in str(caught.value)


def test_the_facts_of_branches_that_are_not_taken_are_known() -> None:
    assert parse("a.b if c.d or e.f else [g.h]").facts == {"a.b", "c.d", "e.f", "g.h"}


def test_readers_cannot_change_facts() -> None:
    value = parse("disk.names").evaluate(FACTS)
    assert isinstance(value, list)
    value.clear()
    assert FACTS["disk.names"] == ["sda", "nvme0n1"]
