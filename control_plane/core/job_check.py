"""What is wrong with a job's specification: everything at once, each with its field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from agent.errors import FieldError
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, UpdatePolicy
from control_plane.api.policy import Admission
from control_plane.core.placement import Demand, Host, Kind, demand_of, explain, fits, room
from control_plane.core.task_spec import RESERVED_PREFIX, unknown_templates


def check_job(
    spec: JobSpec,
    *,
    entitlements: dict[str, EntitlementSpec],
    image_known: bool,
    machines: Sequence[Host],
    known: JobRecord | None,
) -> tuple[FieldError, ...]:
    """Return every reason to refuse the specification; `machines` are the region's, empty."""
    errors = [*_check_text(spec)]
    if not image_known:
        errors.append(_error("image", f"the image store has no image {spec.image}"))
    entitlement = entitlements.get(spec.entitlement)
    if entitlement is None:
        names = ", ".join(sorted(entitlements)) or "there is none yet"
        errors.append(
            _error("entitlement", f"there is no entitlement {spec.entitlement!r} ({names})")
        )
    else:
        errors += _check_capacity(spec, entitlement, machines)
    if known is not None and known.spec.entitlement != spec.entitlement:
        errors.append(
            _error(
                "entitlement",
                f"the job runs in {known.spec.entitlement!r} and cannot move to"
                f" {spec.entitlement!r}; apply it under another name, then stop this one",
            )
        )
    return tuple(errors)


def same_tasks(one: JobSpec, other: JobSpec) -> bool:
    """Return whether both want the same of each task, and differ in number or pace at most."""
    return _per_task(one) == _per_task(other)


def _per_task(spec: JobSpec) -> JobSpec:
    return replace(
        spec, tasks=0, update=UpdatePolicy(), preferences=None, admission=Admission.PARTIAL
    )


def _check_text(spec: JobSpec) -> list[FieldError]:
    errors = [
        _error("ports", f"port {name!r} is listed {count} times")
        for name, count in Counter(spec.ports).items()
        if count > 1
    ]
    if spec.probe is not None and spec.probe.port not in spec.ports:
        names = ", ".join(spec.ports) or "none"
        errors.append(
            _error("probe.port", f"{spec.probe.port!r} is not one of the job's ports ({names})")
        )
    texts = [(f"command[{i}]", text) for i, text in enumerate(spec.command)]
    texts += [(f"environment.{key}", text) for key, text in spec.environment.items()]
    for field, text in texts:
        errors += [
            _error(
                field,
                f"${{{name}}} stands for nothing: use ${{task}}, ${{machine}} or"
                " ${port:NAME} with one of the job's ports; $${ gives a literal ${",
            )
            for name in unknown_templates(text, spec.ports)
        ]
    errors += [
        _error(f"environment.{key}", f"names that begin with {RESERVED_PREFIX} are set by Twine")
        for key in spec.environment
        if key.startswith(RESERVED_PREFIX)
    ]
    return errors


def _check_capacity(
    spec: JobSpec, entitlement: EntitlementSpec, machines: Sequence[Host]
) -> list[FieldError]:
    """Compare with what the entitlement could hold if all its machines were empty."""
    errors = []
    types = set(entitlement.machine_types)
    if types and spec.machine_types and not types & set(spec.machine_types):
        errors.append(
            _error(
                "machine_types",
                f"the entitlement holds only machines of type {', '.join(sorted(types))}",
            )
        )
    held = [m for m in machines if not types or m.machine_type in types]
    demand = demand_of(spec)
    fitting = [machine for machine in held if not fits(demand, machine)]
    if held and not fitting:
        errors += _too_large(demand, held)
    per_machine = max((room(demand, machine, spec.tasks) for machine in fitting), default=0)
    if fitting and spec.tasks > per_machine * (entitlement.machines or 1_000_000):
        errors.append(
            _error(
                "tasks",
                f"{spec.tasks} tasks do not fit on the entitlement's {entitlement.machines}"
                f" machines, at most {per_machine} on each",
            )
        )
    return errors


def _too_large(demand: Demand, machines: Sequence[Host]) -> list[FieldError]:
    fields = {
        Kind.MEMORY: "limits.memory_max_bytes",
        Kind.CPU: "limits.cpu_max_cores",
        Kind.TYPE: "machine_types",
        Kind.PORTS: "ports",
    }
    kinds = {misfit.kind for machine in machines for misfit in fits(demand, machine)}
    why = "; ".join(explain(demand, machines))
    return [
        _error(field, f"no machine can take such a task: {why}")
        for kind, field in fields.items()
        if kind in kinds
    ]


def _error(field: str, reason: str) -> FieldError:
    return FieldError(field=field, reason=reason)
