"""The work for any field of a request grows linearly: eight times the text is not 64 times the
work.

The fields come from the route tables of both programs. Each field of each body grows in the ways
that an attacker would try. The rest of the document is left out or valid.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import inspect

from agent.routes import JOIN_ROUTES
from agent.routes import ROUTES as AGENT_ROUTES
from control_plane.api.routes import ROUTES
from wire.errors import InvalidInput
from wire.fairness import MAX_BODY_BYTES
from wire.routes import Route, decode_json

SMALL, TIMES = MAX_BODY_BYTES // 128, 8
"""Characters of the smaller value. The larger value is a sixteenth of the largest body."""
SMALL_S = 0.05
"""Less work than this is ignored: it is no attack, and too short for a comparison."""
LINEAR = 3.0
"""Permitted factor above linear growth. Quadratic growth has the factor eight."""

Hostile = Callable[[int], Any]
VALUES: dict[str, Hostile] = {
    "letters": lambda n: "a" * n,
    "placeholders": lambda n: "${port:" * (n // 7),
    "dashes": lambda n: "a-" * (n // 2),
    "digits": lambda n: "9" * n,
    "dots": lambda n: "1." * (n // 2),
    "a long text": lambda n: ["a" * n],
    "brackets": lambda n: ["(" * n],
    "many texts": lambda n: [f"n{i}" for i in range(n // 9)],
    "one text often": lambda n: ["web"] * (n // 7),
    "placeholders in many": lambda n: ["${port:no}"] * (n // 14),
    "many tables": lambda n: [{}] * (n // 4),
    "many keys": lambda n: {f"k{i}": "${port:x}" for i in range(n // 20)},
}


def fields_of(info: inspect.Type, where: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field of a type, those of its parts included."""
    match info:
        case inspect.Metadata(type=inner):
            yield from fields_of(inner, where)
        case inspect.UnionType(types=types):
            for one in types:
                yield from fields_of(one, where)
        case inspect.StructType(fields=fields) if len(where) < 3:
            for field in fields:
                place = (*where, field.encode_name)
                yield place
                yield from fields_of(field.type, place)


def document(where: tuple[str, ...], value: Any) -> bytes:
    for name in reversed(where):
        value = {name: value}
    # other fields are compared with these
    value = {"ports": ["http", "http"], "command": ["x"]} | value
    return json.dumps(value).encode()


def work_s(route: Route, data: bytes) -> float:
    began = time.thread_time()
    with contextlib.suppress(InvalidInput):
        decode_json(data, route.request, "the body", route.relations)
    return time.thread_time() - began


def refusal(route: Route, data: bytes) -> InvalidInput:
    """Return why a body is refused. For an accepted body, return an error with an empty text."""
    try:
        decode_json(data, route.request, "the body", route.relations)
    except InvalidInput as e:
        return e
    return InvalidInput("")


BODIES = {
    f"{r.request.__name__}": r
    for r in (*AGENT_ROUTES, *JOIN_ROUTES, *ROUTES)
    if r.request is not None
}
"""One route for each type of body, because the body determines the work."""


@pytest.mark.behaviour("BUG-HT3")
@pytest.mark.parametrize("name", BODIES)
def test_the_work_of_a_request_grows_with_its_size(name: str) -> None:
    """Formerly `${` 20,000 times took 22 s, and a port listed 30,000 times made 246 MB of
    answer."""
    route = BODIES[name]
    for where in dict.fromkeys(fields_of(inspect.type_info(route.request))):
        for what, value in VALUES.items():
            large = work_s(route, document(where, value(SMALL * TIMES)))
            if large < SMALL_S:
                continue
            small = min(work_s(route, document(where, value(SMALL))) for _ in range(3))
            large = min(large, work_s(route, document(where, value(SMALL * TIMES))))
            assert large < LINEAR * TIMES * small, (where, what, small, large)


@pytest.mark.behaviour("BUG-HT3")
@pytest.mark.parametrize("name", BODIES)
def test_a_refusal_is_never_longer_than_the_refused_input(name: str) -> None:
    """The answer has at most 100 errors, and each of them is short."""
    route = BODIES[name]
    for where in dict.fromkeys(fields_of(inspect.type_info(route.request))):
        for what, value in VALUES.items():
            data = document(where, value(SMALL))
            error = refusal(route, data)
            size = len(str(error)) + sum(len(x.field) + len(x.reason) for x in error.errors)
            assert len(error.errors) <= 100, (where, what)
            assert size < 400_000, (where, what, size)
