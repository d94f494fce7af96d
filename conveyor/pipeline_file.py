"""All errors of a pipeline file at once, for the command line and the service.

Rules of a single field are in its type (`api`); rules between fields are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from conveyor.api import (
    GATE_KINDS,
    DeliveryHold,
    DeliveryWindows,
    PipelineGate,
    PipelineSpec,
    PipelineStage,
    PipelineTrigger,
    StageKind,
)
from conveyor.core import schedule
from wire.errors import FieldError, InvalidInput
from wire.quantity_fields import parse_quantities
from wire.routes import invalid
from wire.violations import MAX_ERRORS, violations

T = TypeVar("T")
_JOB_NAME_MAX = 56
"""Characters of a job's name (`JobName`)."""


def pipeline_spec(document: Any, what: str) -> PipelineSpec:
    """Return the pipeline of a document (plain values), or raise `InvalidInput` with every error.

    Sizes and durations may be text with a unit (`10m`).
    """
    document = parse_quantities(document, PipelineSpec)
    if errors := [*violations(document, PipelineSpec), *pipeline_relations(document)][:MAX_ERRORS]:
        error = invalid(errors, what)
        error.hint = "nothing was changed; docs/pipeline-file.md lists every key"
        raise error
    return msgspec.convert(document, PipelineSpec)


def pipeline_relations(document: Any) -> list[FieldError]:
    """Return the contradictions between those fields of a pipeline that have valid values."""
    if not isinstance(document, dict):
        return []
    return list(_relation_errors(document))[:MAX_ERRORS]


def _relation_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    for key in ("jobs", "fleets"):
        names = document.get(key)
        if isinstance(names, list):
            repeated = sorted({str(name) for name in names if names.count(name) > 1})
            if repeated:
                yield FieldError(field=key, reason=f"named twice: {', '.join(repeated)}")
    yield from _target_errors(document)
    gates = document.get("gates", {})
    gates = gates if isinstance(gates, dict) else {}
    yield from _stages_errors(document.get("stages"), gates)
    for name, gate in gates.items():
        yield from _gate_errors(f"gates.{name}", gate)
        yield from _command_errors(f"gates.{name}", name, gate, document.get("name"))
    yield from _trigger_errors(document.get("trigger", {}))
    windows = _converted(document.get("windows"), DeliveryWindows)
    if windows is not None:
        yield from _parse_errors(
            "windows.during", lambda: schedule.parse_windows(windows.during, windows.zone)
        )
    holds = document.get("holds")
    for index, hold in enumerate(holds if isinstance(holds, list) else []):
        yield from _hold_errors(f"holds[{index}]", hold)


def _target_errors(document: dict[Any, Any]) -> Iterator[FieldError]:
    """Require either jobs or fleets, and refuse keys of fleets that only jobs can have."""
    jobs, fleets = document.get("jobs"), document.get("fleets")
    if bool(jobs) == bool(fleets):
        found = "both" if jobs else "none"
        yield FieldError(field="jobs", reason=f"it has {found} of jobs, fleets; exactly one needed")
    if not fleets:
        return
    gates = document.get("gates")
    for name, gate in gates.items() if isinstance(gates, dict) else ():
        if isinstance(gate, dict) and gate.get("command") is not None:
            reason = "it would run as a task of the new image, and fleets have no image"
            yield FieldError(field=f"gates.{name}.command", reason=reason)
    trigger = document.get("trigger")
    if isinstance(trigger, dict) and trigger.get("image"):
        reason = "fleets have no image; start their runs with twinectl pipeline start"
        yield FieldError(field="trigger.image", reason=reason)


def _stages_errors(stages: Any, gates: dict[Any, Any]) -> Iterator[FieldError]:
    if not isinstance(stages, list):
        return
    read = [_converted(stage, PipelineStage) for stage in stages]
    for index, stage in enumerate(read):
        if stage is not None:
            yield from _stage_errors(f"stages[{index}]", stage, gates)
    if stages and (last := read[-1]) is not None and last.kind is not StageKind.ALL:
        reason = "the last stage must be of kind all; otherwise no run ever finishes"
        yield FieldError(field=f"stages[{len(stages) - 1}].kind", reason=reason)
    shares = [(i, s.percent) for i, s in enumerate(read) if s is not None and s.percent is not None]
    for (_, before), (index, after) in pairwise(shares):
        if after <= before:
            reason = f"{after:g} is not above the {before:g} of an earlier stage"
            yield FieldError(field=f"stages[{index}].percent", reason=reason)
    order = [s.kind for s in read if s is not None]
    wanted = sorted(order, key=list(StageKind).index)
    if order != wanted:
        reason = "canary stages come first, then percent, then all"
        yield FieldError(field="stages", reason=reason)


def _stage_errors(where: str, stage: PipelineStage, gates: dict[Any, Any]) -> Iterator[FieldError]:
    needs = {StageKind.CANARY: "tasks", StageKind.PERCENT: "percent"}.get(stage.kind)
    for key in ("tasks", "percent"):
        given = getattr(stage, key) is not None
        if key == needs and not given:
            yield FieldError(
                field=f"{where}.{key}", reason=f"missing: a {stage.kind} stage needs it"
            )
        elif key != needs and given:
            reason = f"a stage of kind {stage.kind} has no {key}"
            yield FieldError(field=f"{where}.{key}", reason=reason)
    known = ", ".join(map(str, gates)) or "none"
    for name in stage.gates:
        if name not in gates:
            reason = f"there is no table [gates.{name}]; known: {known}"
            yield FieldError(field=f"{where}.gates", reason=reason)
    gate_tables = [_converted(gates.get(name), PipelineGate) for name in stage.gates]
    for name, gate in zip(stage.gates, gate_tables, strict=True):
        if gate is not None and gate.compare is not None and stage.kind is StageKind.ALL:
            reason = f"gate {name} compares with stable tasks, and stage all leaves none"
            yield FieldError(field=f"{where}.gates", reason=reason)


def _gate_errors(where: str, gate: Any) -> Iterator[FieldError]:
    if not isinstance(gate, dict):
        return
    given = [kind for kind in GATE_KINDS if gate.get(kind) is not None]
    if len(given) != 1:
        reason = (
            f"it has {' and '.join(given) or 'none'} of {', '.join(GATE_KINDS)}; exactly one needed"
        )
        yield FieldError(field=where, reason=reason)
    query, compare = gate.get("query"), gate.get("compare")
    bounds = ("at_most", "at_least")
    if isinstance(query, dict) and all(query.get(bound) is None for bound in bounds):
        yield FieldError(field=f"{where}.query", reason="give at_most or at_least, or both")
    if isinstance(compare, dict) and "$tasks" not in str(compare.get("promql", "$tasks")):
        reason = "must contain $tasks: otherwise new and stable tasks give the same numbers"
        yield FieldError(field=f"{where}.compare.promql", reason=reason)


def _command_errors(where: str, name: Any, gate: Any, pipeline: Any) -> Iterator[FieldError]:
    read = _converted(gate, PipelineGate)
    if read is None or read.command is None:
        return
    if read.command.timeout_s > read.deadline_s:
        reason = f"shorter than command.timeout_s ({read.command.timeout_s:g}): it would never pass"
        yield FieldError(field=f"{where}.deadline_s", reason=reason)
    length = len(f"{pipeline}-check-{name}")
    if length > _JOB_NAME_MAX:
        reason = (
            f"its check would be job {pipeline}-check-{name}: {length} characters,"
            f" {_JOB_NAME_MAX} are possible"
        )
        yield FieldError(field=where, reason=reason)


def _trigger_errors(document: Any) -> Iterator[FieldError]:
    trigger = _converted(document, PipelineTrigger)
    if trigger is None:
        return
    if trigger.schedule and not trigger.image:
        yield FieldError(field="trigger.image", reason="missing: schedule gives only the time")
    for index, text in enumerate(trigger.schedule):
        parse = partial(schedule.parse_start_time, text)
        yield from _parse_errors(f"trigger.schedule[{index}]", parse)
    yield from _parse_errors("trigger.zone", lambda: schedule.parse_windows([], trigger.zone))


def _hold_errors(where: str, document: Any) -> Iterator[FieldError]:
    hold = _converted(document, DeliveryHold)
    if hold is None:
        return
    bad = [
        *_parse_errors(f"{where}.begin", lambda: schedule.parse_time(hold.begin)),
        *_parse_errors(f"{where}.end", lambda: schedule.parse_time(hold.end)),
    ]
    yield from bad
    if not bad and schedule.parse_time(hold.begin) >= schedule.parse_time(hold.end):
        yield FieldError(field=f"{where}.end", reason="not after begin")


def _parse_errors(field: str, parse: Callable[[], object]) -> Iterator[FieldError]:
    """Yield the error of parsing a field, if there is one."""
    try:
        parse()
    except InvalidInput as e:
        hint = f"; {e.hint}" if e.hint else ""
        yield FieldError(field=field, reason=f"{e}{hint}")


def _converted(value: Any, kind: type[T]) -> T | None:
    """Return a part of the document as its type; None if it is invalid (`violations` says why)."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeError):
        return None
