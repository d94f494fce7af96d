"""How an owner selects machines, in the terms of the paper's allocator (§2.3).

A *hard requirement* excludes machines. A *soft preference* is a machine property that partitions
machines into bins, and a strategy over those bins; it only orders the rest.
`allocator.core.preferences` defines the properties and the strategies.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import ID_PATTERN
from agent.api.ranges import END

Value = Annotated[str, Meta(min_length=1, max_length=255)]
"""A bin: `skylake`, `msb3`, or a place as a path that begins at any level: `dc1/msb3`."""


JobName = Annotated[
    str,
    Meta(
        pattern=ID_PATTERN,
        max_length=56,
        description="1 to 56 of a-z, 0-9 and -, with no dash at the start or end",
    ),
]
"""Leaves room for `-<index>` within the 63 characters of a task id."""

LABEL_NAME = r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"
LABEL_VALUE = r"[A-Za-z0-9]([A-Za-z0-9._:+-]{0,61}[A-Za-z0-9])?"
MAX_LABELS = 32
"""Labels of one machine."""
LabelName = Annotated[
    str,
    Meta(
        pattern=f"^{LABEL_NAME}" + END,
        max_length=63,
        description=(
            "1 to 63 of a-z, 0-9, `-`, `_` and `.`, with a letter or digit at the start and end"
        ),
    ),
]
LabelValue = Annotated[
    str,
    Meta(
        pattern=f"^{LABEL_VALUE}" + END,
        max_length=63,
        description=(
            "1 to 63 of A-Z, a-z, 0-9, `-._:+`, with a letter or digit at the start and end"
        ),
    ),
]
Labels = Annotated[dict[LabelName, LabelValue], Meta(max_length=MAX_LABELS)]
MAX_EXPRESSION = 2000
"""Characters of one requirement."""
Expression = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_EXPRESSION,
        description="a requirement such as `rack in (r1, r2) and gpus >= 1`",
    ),
]
"""A requirement as text: `api.requirements` reads it, docs/requirements-grammar.md says how."""


PropertyName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=80,
        description="a property of machines such as `msb`, `memory` or `label.NAME`",
    ),
]
"""A property that requirements test and preferences order by (docs/requirements-grammar.md)."""
Weights = Annotated[dict[Value, Annotated[int, Meta(ge=1, le=1000)]], Meta(max_length=1000)]


class Property(StrEnum):
    """The properties by which machines differ."""

    REGION = "region"
    DATACENTER = "datacenter"
    MSB = "msb"
    ROW = "row"
    RACK = "rack"
    MACHINE = "machine"
    MACHINE_TYPE = "machine_type"
    GENERATION = "generation"
    SKU = "sku"
    GPU_TYPE = "gpu_type"


class Strategy(StrEnum):
    """How tasks of one job are distributed to the bins of a property."""

    EVEN = "even"
    """To the bin that holds the fewest of them."""
    PACK = "pack"
    """To the bin that holds the most of them."""
    PREFER = "prefer"
    """To the bins named in `values`, in their order, before all others."""
    AVOID = "avoid"
    """To the bins named in `values` only when no other has room."""


class Fit(StrEnum):
    """Which machine is best among the ones that the preferences rank equal."""

    EVEN = "even"
    """The machine with the fewest tasks of the job, then the one with most room: load is even."""
    TIGHT = "tight"
    """The machine with the least room that suffices: few machines are used."""


class Preference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One soft preference; the first in a list matters most."""

    property: PropertyName
    """A property of machines: a word, a number, or a label. Machines without it are one bin."""
    strategy: Strategy = Strategy.EVEN
    values: Annotated[list[Value], Meta(max_length=1000)] = []
    """For `prefer` and `avoid`."""
    weights: Weights = {}
    """For `even`: tasks go to bins in proportion to these weights; other bins have weight 1."""
    at_most: Annotated[int, Meta(ge=1, le=15_000)] | None = None
    """The hard part: no bin gets more tasks of the job than this."""
    max_skew: Annotated[int, Meta(ge=1, le=15_000)] | None = None
    """Also hard, with `even`: the largest difference in tasks between a bin and the emptiest bin
    with suitable machines. Tasks that would exceed it wait."""


class Requirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hard requirement: the property has one of these values."""

    property: Property
    """A property of machines."""
    values: Annotated[list[Value], Meta(min_length=1, max_length=1000)]
    """One of them must be the machine's."""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another job of the same entitlement, and the meaning of near."""

    job: JobName
    """The other job."""
    property: Property = Property.MACHINE
    """Near means: the same machine, rack, MSB, …"""


Factor = Annotated[float, Meta(ge=1, le=10)]


class Overcommit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far limits may exceed what a machine has; 1: not at all (AL21).

    Power is separate: it is overcommitted by default, since few tasks draw their maximum at the
    same time, and its use is checked (AL22).
    """

    cpu: Factor = 1.0
    """The limit of a task divided by its claim."""
    memory: Factor = 1.0
    """The same for memory."""


class Admission(StrEnum):
    """What to do with a job that has room for only a part of its tasks."""

    PARTIAL = "partial"
    """Run what fits; the rest waits."""
    GANG = "gang"
    """All waiting tasks or none."""
