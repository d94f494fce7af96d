"""What a simulated region is made of and what befalls it: a TOML file, read strictly."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agent.api import Name
from control_plane.api.settings import SchedulerSettings
from vm_lab.region.kinds import KINDS, ON_ROLES
from wire.errors import ConfigError, FieldError, NotFound
from wire.violations import violations

Count = Annotated[int, Meta(ge=1, le=100_000)]
Positive = Annotated[float, Meta(gt=0)]
Rate = Annotated[float, Meta(ge=0, le=10_000)]
"""How often something happens in the whole region, in an hour."""

Controller = Literal["shards", "quorum", "stateless", "never"]
"""Kinds of ready controllers (vm_lab/region/applications.py)."""


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a person writes."""


class Shape(_Written, frozen=True, kw_only=True):
    """How many of each there are."""

    regions: Count = 1
    """Data centers are dealt to them in turn."""
    datacenters: Count = 2
    msbs: Count = 4
    """In all; they are dealt to the data centers in turn."""
    racks: Count = 8
    machines: Count = 24
    memory_gib: Count = 8
    cpus: Count = 8
    own_stores: Annotated[int, Meta(ge=0)] = 0
    """Data centers whose broker has a store of its own."""


class ScenarioWork(_Written, frozen=True, kw_only=True):
    """What runs there."""

    entitlements: Count = 2
    spare: Annotated[float, Meta(ge=1)] = 1.6
    """Quota of an entitlement over what its jobs need."""
    jobs: Count = 6
    tasks: tuple[int, int] = (2, 8)
    """Fewest and most tasks of a job."""
    memory_mib: tuple[int, int] = (256, 1024)
    cpu_cores: tuple[float, float] = (0.5, 1.5)
    stop_jobs: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Share of the jobs that a cut-off machine shall stop."""
    controlled: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs that have a TaskController; their kinds are dealt in turn."""
    controllers: Annotated[list[Controller], Meta(max_length=10)] = []
    """The kinds to deal; [] means all of them."""
    controlled_away: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the tasks of a controlled job that may be away; the rest is up to its controller."""
    replicas: Annotated[int, Meta(ge=2, le=10)] = 3
    """Number of neighbouring tasks with each shard, for controllers with shards."""
    paced: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs with canaries, gates, extra tasks and a way back of their own."""
    slow_to_stop: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the jobs whose tasks use up two minutes to stop; machines that are cut off stop
    them."""
    delivered: Annotated[int, Meta(ge=0, le=100)] = 0
    """Number of jobs that have a pipeline, a scaler and an operator (`delivery.py`)."""
    surge_tasks: Annotated[int, Meta(ge=0)] = 0
    """Extra tasks that the jobs of an entitlement may have at once; no task of a job may be missed
    then, and each has one extra. 0: as it is said of `paced`."""
    best_effort: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Pieces of best-effort work that are given to Optimus (`best_effort.py`)."""
    overgranted: bool = False
    """Quotas add up to more than there is: not all of them are used at once."""
    bound: Annotated[int, Meta(ge=0)] = 0
    """The first so many entitlements may have machines of the last data center only."""
    pinned: Annotated[int, Meta(ge=0)] = 0
    """The next so many may have machines of one region only, which are dealt in turn."""
    borrowers: Annotated[int, Meta(ge=0)] = 0
    """The last so many entitlements have no machines of their own: they live on loans."""
    reboot_profiles: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the entitlements whose profile needs a reboot."""


class RoleCounts(_Written, frozen=True, kw_only=True):
    """Processes of the control plane, where it is not one on a store of its own."""

    core: Annotated[int, Meta(ge=1, le=5)] = 3
    """The one that leads, and those that stand by."""
    shards: Annotated[int, Meta(ge=0, le=20)] = 2
    """Shards that are processes; the core has one more."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 2
    """Of each of them."""


class FaultRate(_Written, frozen=True, kw_only=True):
    """One kind of fault."""

    kind: Name
    per_hour: Rate
    seconds: tuple[float, float] = (5.0, 60.0)
    """How long it lasts, from … to."""
    value: tuple[float, float] = (0.0, 0.0)
    """How bad it is; what that means depends on the kind."""
    where: tuple[str, ...] = ("machine",)
    """Domains it strikes, drawn evenly: machine, rack, msb, datacenter, region, job, store."""


class Scenario(_Written, frozen=True, kw_only=True):
    """A region, its jobs, and what befalls both."""

    name: str = ""
    says: str
    """What it is for, in a sentence."""
    shows: list[str] = []
    """Faults of the fault list that it is about: `F-49`."""
    minutes: Positive = 15.0
    """How long faults go on …"""
    settle_minutes: Positive = 20.0
    """… and how long everything then has to come to rest."""
    shape: Shape = Shape()
    work: ScenarioWork = ScenarioWork()
    roles: RoleCounts | None = None
    """The control plane is several processes on etcd; None: one, with stores of its own."""
    faults: list[FaultRate] = []
    story: Annotated[list[str], Meta(max_length=1000)] = []
    """What happens in every seed, as the lines of a story: `30.0s release job:job0`."""
    pairs: Annotated[int, Meta(ge=0, le=100)] = 0
    """Pairs of kinds of `faults` that each seed composes, in a region that it draws itself; the
    rates do not count then. 0: the region is as given here."""
    wishes: Annotated[int, Meta(ge=0, le=100)] = 0
    """Pairs of a wish and a cut that each seed adds to these."""
    settings: dict[str, int | float | dict[str, int | float | str]] = {}
    """Knobs of the control plane's schedulers that differ from their defaults."""


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
    """Return the scenario of a TOML text, or raise `ConfigError` with everything that is wrong."""
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except ValueError as e:
        raise ConfigError(f"scenario {name!r} is no TOML: {e}") from e
    found = violations(document, Scenario)
    if not found:
        scenario = msgspec.convert(document, Scenario)
        for number, rate in enumerate(scenario.faults):
            if rate.kind not in KINDS:
                reason = f"{rate.kind!r} is none of {', '.join(sorted(KINDS))}"
                found.append(FieldError(field=f"faults[{number}].kind", reason=reason))
            elif rate.kind in ON_ROLES and scenario.roles is None:
                reason = f"{rate.kind} needs [roles]: the control plane is one process here"
                found.append(FieldError(field=f"faults[{number}].kind", reason=reason))
        if scenario.roles is not None and scenario.shape.own_stores:
            reason = "processes of a control plane share one store: leave it 0 beside [roles]"
            found.append(FieldError(field="shape.own_stores", reason=reason))
        found += [
            replace(error, field=f"settings.{error.field}")
            for error in violations(scenario.settings, SchedulerSettings)
        ]
        if not found:
            return replace(scenario, name=name)
    listed = "; ".join(f"{e.field}: {e.reason}" for e in found)
    raise ConfigError(f"scenario {name!r} is not valid: {listed}", errors=tuple(found))
