"""Every number, text and list that enters a program has a range.

The route tables list what enters: the requests of both programs, and the answers of agents. An
attacker may have taken over the host of any agent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from agent.api import MachineFacts
from agent.api.ranges import NO_NUL
from agent.routes import JOIN_ROUTES
from agent.routes import ROUTES as AGENT_ROUTES
from control_plane.api.machines import Hardware
from control_plane.api.routes import ROUTES
from wire.errors import InvalidInput
from wire.routes import Route, decode_json

pytestmark = pytest.mark.behaviour("BUG-HT1", "BUG-HT8")

LARGEST = float(1 << 53)
"""Above this value, two programs that read the same JSON may get different numbers."""


def entering() -> dict[str, Any]:
    found = {f"{r.name} takes": r.request for r in (*ROUTES, *AGENT_ROUTES, *JOIN_ROUTES)}
    found |= {f"{r.name} of an agent answers": r.response for r in AGENT_ROUTES}
    found["the inventory"] = Hardware
    return {name: kind for name, kind in found.items() if kind is not None}


def unbounded(info: inspect.Type, where: str, seen: frozenset[type]) -> Iterator[str]:
    """Yield each place below a type without a bound of value or length, or with an unbounded
    pattern."""
    match info:
        case inspect.Metadata(type=inner):
            yield from unbounded(inner, where, seen)
        case inspect.IntType() | inspect.FloatType():
            least = info.ge if info.ge is not None else info.gt
            most = info.le if info.le is not None else info.lt
            if least is None or most is None or not -LARGEST <= least <= most <= LARGEST * 1e3:
                yield f"{where}: a number from {least} to {most}"
        case inspect.StrType():
            if info.max_length is None and not _is_short(info.pattern):
                yield f"{where}: text of any length"
            if info.pattern not in (None, NO_NUL) and str(info.pattern).endswith("$"):
                yield f"{where}: a final newline is accepted (end with agent.api.ranges.END)"
        case inspect.ListType(item_type=item):
            if info.max_length is None:
                yield f"{where}: a list of any length"
            yield from unbounded(item, f"{where}[]", seen)
        case inspect.DictType(key_type=key, value_type=value):
            if info.max_length is None:
                yield f"{where}: a table of any length"
            yield from unbounded(key, f"{where} keys", seen)
            yield from unbounded(value, f"{where} values", seen)
        case inspect.UnionType(types=types):
            for one in types:
                yield from unbounded(one, where, seen)
        case inspect.StructType(cls=cls, fields=fields):
            if cls not in seen:
                for field in fields:
                    place = f"{where}.{field.encode_name}"
                    yield from unbounded(field.type, place, seen | {cls})


def _is_short(pattern: str | None) -> bool:
    """Return whether a pattern bounds the length, because it has no unbounded repetition."""
    return pattern is not None and "*" not in pattern and "+" not in pattern


@pytest.mark.behaviour("BUG-HT1", "BUG-HT8", "BUG-CP90")
@pytest.mark.parametrize("name", entering())
def test_everything_that_enters_has_a_range(name: str) -> None:
    """The test includes types that are added later."""
    assert list(unbounded(inspect.type_info(entering()[name]), "", frozenset())) == []


HUGE = ["1" + "0" * 400, "1e308", "-1", str(1 << 53 | 1), "1e400"]
UNREADABLE = "1e400"
"""No program can read it as a number. The document is refused before its fields are checked."""


@pytest.mark.behaviour("BUG-HT1")
@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("field", ["memory_bytes", "cpus", "disk_bytes", "numa_nodes"])
def test_facts_of_a_host_are_refused_with_field_value_and_range(field: str, number: str) -> None:
    """Formerly memory of 10^400 bytes was stored, and the control plane could not start again."""
    facts = {
        "machine_id": "vm1",
        "boot_id": "b",
        "kernel": "6.12",
        "cpu_model": "x",
        "agent_version": "1",
    } | dict.fromkeys(["cpus", "sockets", "numa_nodes"], 1)
    facts |= dict.fromkeys(["memory_bytes", "disk_bytes", "disk_free_bytes"], 1 << 30)
    text = json.dumps(facts | {field: 0}).replace(f'"{field}": 0', f'"{field}": {number}')
    with pytest.raises(InvalidInput) as refused:
        decode_json(text.encode(), MachineFacts, "the answer")
    if number != UNREADABLE:
        (error,) = refused.value.errors
        assert error.field == field
    assert len(str(refused.value)) < 300


@pytest.mark.behaviour("BUG-HT1")
def test_numbers_of_queries_have_a_range() -> None:
    from wire.fairness import Peer
    from wire.server import Call

    route = Route("x", "GET", "/x", query=("after",))
    for text in ("-1", "nan", "inf", "1e400", "1" + "0" * 400, "x", "1e16"):
        with pytest.raises(InvalidInput):
            Call(route, Peer("x", "user"), query={"after": text}).number("after")


@pytest.mark.behaviour("BUG-UX155")
def test_a_parameter_that_is_neither_true_nor_false_is_refused() -> None:
    """Regression: `dry_run=on` counted as false, and the change was made."""
    from wire.fairness import Peer
    from wire.server import Call

    route = Route("x", "PUT", "/x", query=("dry_run",))

    def flag(text: str) -> bool:
        return Call(route, Peer("x", "user"), query={"dry_run": text}).flag("dry_run")

    assert [flag(text) for text in ("1", "true", "True", "yes")] == [True] * 4
    assert [flag(text) for text in ("", "0", "false", "no")] == [False] * 4
    assert not Call(route, Peer("x", "user")).flag("dry_run")
    for text in ("on", "y", "2", "maybe", "true "):
        with pytest.raises(InvalidInput, match="dry_run must be true or false"):
            flag(text)


@pytest.mark.behaviour("BUG-HT1")
def test_an_answer_with_a_huge_number_is_invalid() -> None:
    """A joined agent may send any answer. The client refuses this one."""
    for number in HUGE:
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(f'{{"cpus": {number}}}', type=Hardware)
