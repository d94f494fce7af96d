"""What is wrong with a job's specification: everything at once, each with its field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from agent.api import ImageInfo, ImageTrust
from agent.api.credentials import contradictions as odd_configuration
from agent.api.relaxations import TO_BE_ALLOWED
from agent.api.signing import SIGN_HINT, distrust
from control_plane.allocator.core.demand import Demand, claiming_cpu, demand_for
from control_plane.allocator.core.feasibility import Tally, judge, kind_demand
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planned_room import PlannedRoom
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, UpdatePolicy
from control_plane.api.policy import Admission, Fit
from control_plane.scheduler.core.task_spec import RESERVED_PREFIX, unknown_templates
from wire.errors import FieldError


def check_job(
    spec: JobSpec,
    *,
    entitlements: Mapping[str, EntitlementSpec],
    image_known: bool,
    machines: Sequence[Machine],
    known: JobRecord | None,
    moves: bool = False,
) -> list[FieldError]:
    """Return every reason to refuse the specification; `machines` are the region's kinds.

    `moves`: its owner wants the job in another entitlement.
    """
    errors = [*_check_text(spec)]
    wrong = odd_configuration(spec.configuration, spec.credentials)
    errors += [_error(field, reason) for field, reason in wrong]
    if not image_known:
        errors.append(_error("image", f"the image store has no image {spec.image}"))
    entitlement = entitlements.get(spec.entitlement)
    if entitlement is None:
        names = ", ".join(sorted(entitlements)) or "there are no entitlements yet"
        errors.append(
            _error("entitlement", f"there is no entitlement {spec.entitlement!r} ({names})")
        )
    else:
        errors += _check_capacity(spec, entitlement, machines)
        errors += _check_relaxations(spec, entitlement)
    runtimes = {s.runtime for s in known.specs.values()} if known is not None else set[str]()
    if spec.runtime and spec.runtime not in runtimes:
        errors.append(
            _error("runtime", f"operators set it: twinectl job runtime {spec.name} --to NAME")
        )
    if known is not None and known.spec.entitlement != spec.entitlement and not moves:
        errors.append(
            _error(
                "entitlement",
                f"the job runs in {known.spec.entitlement!r}; to move it to {spec.entitlement!r}: "
                f"twinectl job move {spec.name} --entitlement {spec.entitlement}",
            )
        )
    return errors


def check_trust(
    image: ImageInfo | None, entitlement: EntitlementSpec | None
) -> Iterator[FieldError]:
    """Yield why a stored image must not be run in an entitlement."""
    if image is None or entitlement is None:
        return
    trust = ImageTrust(keys=entitlement.image_keys, signatures=image.signatures)
    if why := distrust(image.digest, trust):
        yield _error("image", f"{why}; {SIGN_HINT}")


def check_neighbours(
    spec: JobSpec, find: Callable[[str], JobRecord | None]
) -> Iterator[FieldError]:
    """Yield what is wrong with the jobs that a job names; a named job need not exist yet."""
    apart = {(neighbour.job, neighbour.property) for neighbour in spec.apart_from}
    for field in ("apart_from", "together_with"):
        for i, neighbour in enumerate(getattr(spec, field)):
            where, name = f"{field}[{i}].job", neighbour.job
            if name == spec.name:
                hint = "to place the tasks of one job, use a preference with at_most or pack"
                yield _error(where, f"{name!r} is the job itself; {hint}")
                continue
            other = find(name)
            if other is not None and other.spec.entitlement != spec.entitlement:
                reason = f"{name!r} runs in {other.spec.entitlement!r}; only jobs of"
                yield _error(where, f"{reason} {spec.entitlement!r} can be named")
            if field == "apart_from":
                continue
            if (name, neighbour.property) in apart:
                yield _error(where, f"apart_from also has {name!r} with the same property")
            if other is not None and any(n.job == spec.name for n in other.spec.together_with):
                yield _error(
                    where, f"{name!r} already waits for this job: only one of them can be first"
                )


def check_named(spec: JobSpec, records: Iterable[JobRecord]) -> Iterator[FieldError]:
    """Yield the jobs of other entitlements that name a job: they could not be placed near it."""
    for record in records:
        neighbours = (*record.spec.apart_from, *record.spec.together_with)
        elsewhere = record.spec.entitlement != spec.entitlement and record.name != spec.name
        if elsewhere and any(neighbour.job == spec.name for neighbour in neighbours):
            reason = f"job {record.name!r} of {record.spec.entitlement!r} names it as neighbour"
            yield _error("entitlement", reason)


def claiming(spec: JobSpec, known: JobSpec | None, default_cpus: float) -> JobSpec:
    """Return the specification with the CPU claim of its tasks, or the default claim.

    A job of an earlier release without a default keeps its claim until its next version: applying
    or resizing it moves no task.
    """
    claims = claiming_cpu(spec, default_cpus)
    if claims is not spec and known is not None and same_tasks(replace(known, cpus=None), spec):
        return replace(spec, cpus=known.cpus)
    return claims


def same_tasks(one: JobSpec, other: JobSpec) -> bool:
    """Return whether tasks of both run the same: only number, pace or placement may differ."""
    return _per_task(one) == _per_task(other)


def _per_task(spec: JobSpec) -> JobSpec:
    return replace(
        spec,
        tasks=0,
        update=UpdatePolicy(),
        machine_types=[],
        requires=[],
        preferences=None,
        apart_from=[],
        together_with=[],
        admission=Admission.PARTIAL,
        controller=None,
        fit=Fit.EVEN,
        autoscale=None,
    )


def life_texts(spec: JobSpec) -> list[tuple[str, str]]:
    """Return (field, argument) of all commands except the main one."""
    life = spec.life
    commands = {f"life.init[{i}].command": step.command for i, step in enumerate(life.init)}
    if life.pre_stop is not None:
        commands["life.pre_stop.command"] = life.pre_stop.command
    probes = {"probe": spec.probe, "life.startup": life.startup, "life.liveness": life.liveness}
    commands |= {f"{name}.command": p.command for name, p in probes.items() if p is not None}
    return [(f"{at}[{i}]", text) for at, words in commands.items() for i, text in enumerate(words)]


def _check_text(spec: JobSpec) -> list[FieldError]:
    errors = [
        _error("ports", f"port {name!r} is listed {count} times")
        for name, count in Counter(spec.ports).items()
        if count > 1
    ]
    life = spec.life
    for field, probe in (
        ("probe", spec.probe),
        ("life.startup", life.startup),
        ("life.liveness", life.liveness),
        ("life.notice", life.notice),
    ):
        if probe is not None and probe.port is not None and probe.port not in spec.ports:
            names = ", ".join(spec.ports) or "none"
            why = f"{probe.port!r} is not one of the job's ports ({names})"
            errors.append(_error(f"{field}.port", why))
    texts = [(f"command[{i}]", text) for i, text in enumerate(spec.command)]
    texts += life_texts(spec)
    texts += [(f"environment.{key}", text) for key, text in spec.environment.items()]
    for field, text in texts:
        errors += [
            _error(
                field,
                f"${{{name}}} has no value: use ${{task}}, ${{machine}} or"
                " ${port:NAME} with one of the job's ports; $${ gives a literal ${",
            )
            for name in unknown_templates(text, spec.ports)
        ]
    errors += [
        _error(
            f"environment.{key}", f"names that begin with {RESERVED_PREFIX} are reserved for Twine"
        )
        for key in spec.environment
        if key.startswith(RESERVED_PREFIX)
    ]
    return errors


def _check_relaxations(spec: JobSpec, entitlement: EntitlementSpec) -> list[FieldError]:
    """Return errors for relaxations that are not allowed; the command in it keeps allowed ones."""
    wanted = {*spec.relaxations} & {*TO_BE_ALLOWED}
    lacking = sorted(wanted - {*entitlement.relaxations})
    if not lacking:
        return []
    options = " ".join(f"--relaxation {r}" for r in sorted(wanted | {*entitlement.relaxations}))
    why = (
        f"entitlement {spec.entitlement!r} does not allow {' and '.join(lacking)}: a user who may "
        f"decide requests can run twinectl entitlement update {spec.entitlement} {options}"
    )
    return [_error("relaxations", why)]


def _check_capacity(
    spec: JobSpec, entitlement: EntitlementSpec, machines: Sequence[Machine]
) -> list[FieldError]:
    """Compare the job with what the entitlement could hold on empty machines."""
    errors = []
    types = set(entitlement.machine_types or entitlement.per_type)
    if types and spec.machine_types and not types & set(spec.machine_types):
        errors.append(
            _error(
                "machine_types",
                f"the entitlement holds only machines of type {', '.join(sorted(types))}",
            )
        )
    errors += _check_overcommit(spec, entitlement)
    tally = Tally(kind_demand(demand_for(spec, entitlement)))
    held = _possible_machines(entitlement, machines)
    for machine in held:
        tally.add(machine, PlannedRoom.whole(machine.capacity))
    if held and not tally.fitting:
        errors += _too_large(spec, tally)
    return errors


def _possible_machines(entitlement: EntitlementSpec, machines: Sequence[Machine]) -> list[Machine]:
    """Return the kinds of machines that the entitlement may hold."""
    types = set(entitlement.machine_types or entitlement.per_type)
    return [m for m in machines if not types or m.capacity.machine_type in types]


def check_quota(
    spec: JobSpec, entitlement: EntitlementSpec | None, machines: Sequence[Machine]
) -> list[FieldError]:
    """Return why the tasks do not fit on as many empty machines as the entitlement may hold.

    Returns nothing where no task fits on any of them: `check_job` says why.
    """
    if entitlement is None or entitlement.machines is None:
        return []
    quota = entitlement.machines + entitlement.borrows
    demand = kind_demand(demand_for(spec, entitlement))
    most = max(
        (count_fitting(demand, m, spec.tasks) for m in _possible_machines(entitlement, machines)),
        default=0,
    )
    if not most or spec.tasks <= most * quota:
        return []
    why = (
        f"{spec.tasks} tasks do not fit on the entitlement's {quota}"
        f" machines, at most {most} on each"
    )
    return [_error("tasks", why)]


def count_fitting(demand: Demand, machine: Machine, most: int) -> int:
    """Return how many such tasks fit on an empty machine, at most `most`."""
    space = PlannedRoom.whole(machine.capacity)
    count = 0
    while count < most and not judge(demand, machine, space):
        space.take(demand, machine.capacity)
        space.pick_ports(demand.ports)
        count += 1
    return count


def _check_overcommit(spec: JobSpec, entitlement: EntitlementSpec) -> list[FieldError]:
    wanted, allowed = spec.overcommit, entitlement.overcommit
    return [
        _error(
            f"overcommit.{name}",
            f"{want:g} is requested and the entitlement allows {most:g}",
        )
        for name, want, most in (
            ("cpu", wanted.cpu, allowed.cpu),
            ("memory", wanted.memory, allowed.memory),
        )
        if want > most
    ]


_FIELDS = {
    "memory": "limits.memory_max_bytes",
    "cpu": "cpus",
    "gpus": "gpus",
    "network": "network_mbps",
    "disk": "disk_bytes",
    "ports": "ports",
}


def _cpu_field(spec: JobSpec) -> str:
    """Return the key of a job file that decides how much CPU its tasks claim."""
    if spec.resources.exclusive_cpus:
        return "resources.exclusive_cpus"
    if spec.rru:
        return "rru"
    return "limits.cpu_max_cores" if spec.cpus is None else "cpus"


def _too_large(spec: JobSpec, tally: Tally) -> list[FieldError]:
    why = "; ".join(tally.reasons())
    lacks = tally.lacks()
    excluding = "machine_types" if spec.machine_types and not spec.requires else "requires"
    known = _FIELDS | {"cpu": _cpu_field(spec), "excluded": excluding}
    fields = [field for lack, field in known.items() if lack in lacks]
    return [_error(field, f"no machine can take such a task: {why}") for field in fields]


def _error(field: str, reason: str) -> FieldError:
    return FieldError(field=field, reason=reason)
