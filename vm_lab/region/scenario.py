"""Scenarios: the parts, the jobs and the faults of a simulated region, read from a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agent.api import Name
from control_plane.api.settings import SchedulerSettings
from vm_lab.region.kinds import KINDS, ON_ROLES
from wire.errors import ConfigError, FieldError, NotFound
from wire.toml_limits import parse_toml
from wire.violations import violations

Count = Annotated[int, Meta(ge=1, le=100_000)]
Positive = Annotated[float, Meta(gt=0)]
Rate = Annotated[float, Meta(ge=0, le=10_000)]
"""How often something happens in the whole region, in an hour."""

Seconds = Annotated[float, Meta(ge=0)]

Where = Literal["machine", "rack", "msb", "datacenter", "region", "job", "store"]
"""Kinds of targets."""

Controller = Literal["shards", "quorum", "stateless", "never"]
"""Kinds of ready controllers (vm_lab/region/applications.py)."""


class _ScenarioTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a scenario file."""


class Shape(_ScenarioTable, frozen=True, kw_only=True):
    """Numbers of locations and machines."""

    regions: Count = 1
    """Data centers are dealt to them in turn."""
    datacenters: Count = 2
    msbs: Count = 4
    """In total; they are dealt to the data centers in turn."""
    racks: Count = 8
    machines: Count = 24
    memory_gib: Count = 8
    cpus: Count = 8
    own_stores: Annotated[int, Meta(ge=0)] = 0
    """Number of data centers whose broker has a store of its own."""


class ScenarioWork(_ScenarioTable, frozen=True, kw_only=True):
    """Entitlements and jobs."""

    entitlements: Count = 2
    spare: Annotated[float, Meta(ge=1)] = 1.6
    """Quota of an entitlement, as a multiple of the machines that its jobs need."""
    jobs: Count = 6
    tasks: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]] = (2, 8)
    """Fewest and most tasks of a job."""
    memory_mib: tuple[Count, Count] = (256, 1024)
    cpu_cores: tuple[Positive, Positive] = (0.5, 1.5)
    stop_jobs: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Share of the jobs that a cut-off machine must stop."""
    controlled: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs that have a TaskController; their kinds are dealt in turn."""
    controllers: Annotated[list[Controller], Meta(max_length=10)] = []
    """The kinds to deal; [] means all of them."""
    controlled_away: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the tasks of a controlled job that may be unavailable, if its controller agrees."""
    replicas: Annotated[int, Meta(ge=2, le=10)] = 3
    """Number of tasks, with adjacent indexes, that have each shard, for controllers with shards."""
    paced: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs with canaries, health gates, extra tasks and automatic rollback."""
    slow_to_stop: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs whose tasks take two minutes to stop, and that cut-off machines stop."""
    delivered: Annotated[int, Meta(ge=0, le=100)] = 0
    """Number of jobs that have a pipeline, a scaler and an operator (`delivery.py`)."""
    surge_tasks: Annotated[int, Meta(ge=0)] = 0
    """Extra tasks that all jobs of an entitlement may have at once. Above 0, each job has one extra
    task and no task may be unavailable; at 0, `paced` decides."""
    best_effort: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Pieces of best-effort work that are given to Optimus (`best_effort.py`)."""
    overgranted: bool = False
    """Whether the quotas add up to more than all machines; not all are used at once."""
    bound: Annotated[int, Meta(ge=0)] = 0
    """Number of entitlements, the first ones, that are bound to the last data center."""
    pinned: Annotated[int, Meta(ge=0)] = 0
    """Number of entitlements, the next ones, that are pinned to one region, dealt in turn."""
    borrowers: Annotated[int, Meta(ge=0)] = 0
    """Number of entitlements, the last ones, that have no quota and borrow all machines."""
    reboot_profiles: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the entitlements whose profile needs a reboot."""


class RoleCounts(_ScenarioTable, frozen=True, kw_only=True):
    """Numbers of processes of the control plane, if it runs as several processes."""

    core: Annotated[int, Meta(ge=1, le=5)] = 3
    """Replicas of the core: one leads, the others are standbys."""
    shards: Annotated[int, Meta(ge=0, le=20)] = 2
    """Shards that run as processes; the core runs one more."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 2
    """Replicas of each of these shards."""


class FaultRate(_ScenarioTable, frozen=True, kw_only=True):
    """One kind of fault."""

    kind: Name
    per_hour: Rate
    seconds: tuple[Seconds, Seconds] = (5.0, 60.0)
    """Shortest and longest duration."""
    value: tuple[float, float] = (0.0, 0.0)
    """Smallest and largest severity; the kind gives its meaning and unit (`kinds.py`)."""
    where: Annotated[tuple[Where, ...], Meta(min_length=1, max_length=100)] = ("machine",)
    """Kinds of targets, drawn evenly; a job stands for the machine of its first task."""


class Scenario(_ScenarioTable, frozen=True, kw_only=True):
    """A region, its jobs, and the faults of both."""

    name: str = ""
    says: str
    """Its purpose, in a sentence."""
    shows: list[str] = []
    """Faults of the fault list that it shows: `F-49`."""
    minutes: Positive = 15.0
    """Duration of the story."""
    settle_minutes: Positive = 20.0
    """Time after the story within which the region must come to rest."""
    shape: Shape = Shape()
    work: ScenarioWork = ScenarioWork()
    roles: RoleCounts | None = None
    """The control plane's processes on etcd; None: it is one process with stores of its own."""
    faults: list[FaultRate] = []
    story: Annotated[list[str], Meta(max_length=1000)] = []
    """Events of every seed, as the lines of a story: `30.0s release job:job0`."""
    pairs: Annotated[int, Meta(ge=0, le=100)] = 0
    """Pairs of kinds of `faults` in the story of each seed, which also draws its region and ignores
    the rates. 0: the region is as given here."""
    requests: Annotated[int, Meta(ge=0, le=100)] = 0
    """Pairs of a request and a cut that each seed adds."""
    settings: dict[str, int | float | dict[str, int | float | str]] = {}
    """Settings of the control plane's schedulers that differ from their defaults."""


def names() -> list[str]:
    """Return the scenarios that come with this package."""
    folder = resources.files("vm_lab.region") / "scenarios"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name[-5:] == ".toml")


def load(name: str) -> Scenario:
    """Return a scenario by its name, or from a file that ends in `.toml`."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text()
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read the scenario {name}: {e}") from e
        return parse(text, Path(name).stem)
    if name not in names():
        raise NotFound(
            f"there is no scenario {name!r}", hint=f"one of {', '.join(names())}, or a .toml file"
        )
    text = (resources.files("vm_lab.region") / "scenarios" / f"{name}.toml").read_text()
    return parse(text, name)


def parse(text: str, name: str) -> Scenario:
    """Return the scenario of a TOML text, or raise `ConfigError` with all errors."""
    try:
        document = parse_toml(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"scenario {name!r} is no TOML: {e}") from e
    errors = violations(document, Scenario)
    if not errors:
        scenario = msgspec.convert(document, Scenario)
        errors = list(_contradictions(scenario))
        if not errors:
            return replace(scenario, name=name)
    listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
    raise ConfigError(f"scenario {name!r} is not valid: {listed}", errors=tuple(errors))


def _contradictions(scenario: Scenario) -> Iterator[FieldError]:
    """Yield the errors of fields that the types do not find."""
    yield from _reversed_bounds("work", scenario.work)
    for number, rate in enumerate(scenario.faults):
        field = f"faults[{number}]"
        yield from _reversed_bounds(field, rate)
        if rate.kind not in KINDS:
            reason = f"{rate.kind!r} is none of {', '.join(sorted(KINDS))}"
            yield FieldError(field=f"{field}.kind", reason=reason)
        elif rate.kind in ON_ROLES and scenario.roles is None:
            reason = f"{rate.kind} needs [roles]: the control plane is one process here"
            yield FieldError(field=f"{field}.kind", reason=reason)
        elif "store" in rate.where and not rate.kind.startswith("store-"):
            yield FieldError(field=f"{field}.where", reason=f"{rate.kind} is no fault of a store")
    if scenario.roles is not None and scenario.shape.own_stores:
        reason = "processes of a control plane share one store: leave it 0 with [roles]"
        yield FieldError(field="shape.own_stores", reason=reason)
    for error in violations(scenario.settings, SchedulerSettings):
        yield replace(error, field=f"settings.{error.field}")


def _reversed_bounds(field: str, table: _ScenarioTable) -> Iterator[FieldError]:
    for name in table.__struct_fields__:
        match getattr(table, name):
            case (int() | float() as least, int() | float() as most) if least > most:
                reason = f"the first bound, {least:g}, is more than the second, {most:g}"
                yield FieldError(field=f"{field}.{name}", reason=reason)
