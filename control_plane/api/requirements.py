"""The properties that requirements of machines can test, and their meaning: `Term`.

`api.requirement_parser` parses texts of users, `broker.core.matching` tests machines. `text_of`
writes a term so that it reads back the same: that is how terms are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.api.policy import Property
from wire.units import cores_text, size_text

LABEL = "label."
"""Prefix of names of labels."""
CAPABILITY = "capability."
"""Prefix of names of capabilities, the features of a host that its agent reports. A capability
exists or not; it has no value."""

TEXTS: dict[str, str] = {
    "region": "the region",
    "datacenter": "the data center",
    "msb": "the main switch board: `msb3`, or `dc1/msb3` where the name is not unique",
    "row": "the row: its name, or a path that ends with it, `dc1/msb3/row2`",
    "rack": "the rack: its name, or a path that ends with it",
    "machine": "the machine's own name",
    "machine_type": "the hardware type",
    "generation": "the processor's generation",
    "sku": "the purchased hardware configuration",
    "gpu_type": "the kind of GPU",
}
"""Properties whose values are words."""
NUMBERS: dict[str, str] = {
    "rru": "relative resource units of the whole machine",
    "cpus": "hardware threads",
    "memory": "memory that tasks may use, a size",
    "gpus": "GPUs",
    "network_mbps": "network, Mbit/s",
    "disk": "disk that tasks may use, a size",
    "power_w": "nominal draw, watts",
}
"""Numeric properties of the whole machine, not of its free part."""
OF_RECORDS: dict[str, str] = {
    "state": "`up` or `down`",
    "entitlement": "the entitlement that holds it; a free machine has none",
    "cluster": "the historic cluster, for which the machine was bought",
    "profile": "the host profile that was verified last",
}
"""Properties that change while tasks run; only lists of machines may test them."""
SIZES = ("memory", "disk")
KEYWORDS = frozenset({"and", "or", "not", "in", "exists", "because"})
"""Words of the grammar; as values they need quotation marks."""
_BARE = re.compile(r"[A-Za-z0-9_./:+-]+")
FOR_JOBS = frozenset({*TEXTS, *NUMBERS})
FOR_LISTS = frozenset({*FOR_JOBS, *OF_RECORDS})


class In(NamedTuple):
    """The property is one of these words."""

    property: str
    values: frozenset[str]


@dataclass(frozen=True, slots=True)
class Compare:
    """The property is a number for which the comparison holds."""

    property: str
    operator: str
    """`=`, `<`, `<=`, `>` or `>=`."""
    number: float


@dataclass(frozen=True, slots=True)
class Exists:
    """The property exists: a word that is not empty, a number that is not 0."""

    property: str


@dataclass(frozen=True, slots=True)
class Not:
    """The term does not hold."""

    term: Term


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of these hold."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of these holds."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """The term may hold, as far as these known properties decide. It is not part of the grammar."""

    term: Term
    known: frozenset[str]


@dataclass(frozen=True, slots=True)
class Because:
    """The term must hold, and its author gave a reason."""

    term: Term
    reason: str


Term = In | Compare | Exists | Not | AllOf | AnyOf | Maybe | Because


def text_of(term: Term) -> str:
    """Return a text that `parse` reads as this term."""
    match term:
        case Compare(property, operator, number):
            shown = size_text(int(number)) if property in SIZES else cores_text(number)
            return f"{property} {operator} {shown}"
        case Exists(property):
            return f"{property} exists"
        case Not(In(property, values)):
            return f"{property} not in {_listed(values)}"
        case Not(inner):
            return f"not {_inner(inner)}"
        case Maybe(inner):
            return text_of(inner)
        case Because(inner, reason):
            return f"{text_of(inner)} because {_in_quotes(reason)}"
        case AllOf(terms):
            return " and ".join(map(_inner, terms))
        case AnyOf(terms):
            return " or ".join(map(_inner, terms))
        case (property, values):
            if len(values) == 1:
                return f"{property} = {_quoted(*values)}"
            return f"{property} in {_listed(values)}"
    raise TypeError(term)


def properties_of(term: Term) -> frozenset[str]:
    """Return every property that a term tests."""
    match term:
        case Not(inner) | Maybe(term=inner) | Because(term=inner):
            return properties_of(inner)
        case AllOf(terms) | AnyOf(terms):
            return frozenset().union(*map(properties_of, terms))
        case Compare(property=name) | Exists(property=name):
            return frozenset({name})
        case _:
            return frozenset({term[0]})


def is_pair(term: Term) -> bool:
    """Return whether a term is a property and its values: the stored form of early releases."""
    return isinstance(term, tuple) and term[0] in TEXTS


def _inner(term: Term) -> str:
    text = text_of(term)
    return f"({text})" if isinstance(term, AllOf | AnyOf) else text


def _listed(values: Iterable[str]) -> str:
    return f"({', '.join(_quoted(value) for value in sorted(values))})"


def _quoted(value: str) -> str:
    if _BARE.fullmatch(value) and value not in KEYWORDS:
        return value
    return _in_quotes(value)


def _in_quotes(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


assert TEXTS.keys() == {str(p) for p in Property}, "every property has its words"
