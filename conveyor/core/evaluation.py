"""Verdicts of gates: when to measure, and what follows from the measurements of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from conveyor.api import CompareGate, HealthGate, PipelineGate, PipelineStage, QueryGate
from conveyor.core.stages import stage_gates
from conveyor.core.statistics import compare_samples
from conveyor.runs import GateOutcome, GateVerdict, JobProgress, PipelineRun

_BACK_OFF_MAX_S = 60.0
"""Longest pause between two measurements of a gate without data."""
_DOUBLINGS_MAX = 3
_SHOWN = 5
"""Series that a reason names."""


@dataclass(frozen=True, slots=True)
class StageEvaluation:
    """The common verdict of a stage's gates."""

    failed: str = ""
    """Why the stage failed."""
    waits: str = ""
    """What the stage waits for. If this and `failed` are empty, the stage passed."""
    due: tuple[str, ...] = ()
    """Gates to measure now."""


def soaked_s(run: PipelineRun, now: float) -> float:
    """Return the seconds since the current step was reached, which it must have been."""
    reached = run.steps[-1].reached
    assert reached is not None
    return now - reached


def evaluate_stage(run: PipelineRun, stage: PipelineStage, now: float) -> StageEvaluation:
    """Return the result of the gates of the current step, which must have been reached."""
    gates, soaked_for_s = stage_gates(run.spec, stage), soaked_s(run, now)
    is_soaked = soaked_for_s >= stage.soak_s
    for name, gate in gates.items():
        verdict = run.verdicts.get(name)
        if verdict is not None and _fails(verdict, gate):
            return StageEvaluation(failed=f"gate {name}: {verdict.reason}")
        is_late = soaked_for_s - stage.soak_s > gate.deadline_s
        if is_soaked and is_late and not _has_passed(verdict, gate):
            last = verdict.reason if verdict is not None else "it was never measured"
            reason = f"gate {name} did not pass within {gate.deadline_s:g} s after the soak: {last}"
            return StageEvaluation(failed=reason)
    due = tuple(n for n, g in gates.items() if _is_due(run.verdicts.get(n), g, now, is_soaked))
    if not is_soaked:
        waits = f"soaks, {max(0.0, soaked_for_s):.0f} of {stage.soak_s:.0f} s"
        return StageEvaluation(waits=waits, due=due)
    left = [name for name, gate in gates.items() if not _has_passed(run.verdicts.get(name), gate)]
    if left:
        word = "approval" if all(gates[name].approval is not None for name in left) else "gate"
        return StageEvaluation(waits=f"waits for {word} {', '.join(left)}", due=due)
    return StageEvaluation(due=due)


def with_verdict(run: PipelineRun, verdict: GateVerdict) -> PipelineRun:
    """Return the run with one more verdict on its current step."""
    before = run.verdicts.get(verdict.gate)
    if before is not None and before.outcome is verdict.outcome:
        verdict = replace(verdict, in_a_row=before.in_a_row + 1)
    return replace(run, verdicts=run.verdicts | {verdict.gate: verdict}, measured=run.measured + 1)


def _fails(verdict: GateVerdict, gate: PipelineGate) -> bool:
    return verdict.outcome is GateOutcome.FAIL and verdict.in_a_row >= gate.failures


def _has_passed(verdict: GateVerdict | None, gate: PipelineGate) -> bool:
    if verdict is None or verdict.outcome is not GateOutcome.PASS:
        return False
    return verdict.after_soak or gate.approval is not None


def _is_due(verdict: GateVerdict | None, gate: PipelineGate, now: float, is_soaked: bool) -> bool:
    """Return whether to measure now; pauses after measurements without data double, to a minute."""
    if gate.approval is not None:
        return False
    if verdict is None or (is_soaked and not verdict.after_soak):
        return True
    pause_s = gate.every_s
    if verdict.outcome is GateOutcome.NO_DATA:
        longer_s = pause_s * 2 ** min(verdict.in_a_row - 1, _DOUBLINGS_MAX)
        pause_s = max(pause_s, min(longer_s, _BACK_OFF_MAX_S))
    return not 0 <= now - verdict.at < pause_s


# -- kinds of gates


@dataclass(frozen=True, slots=True)
class Measurement:
    """Outcome of one measurement, with its numbers."""

    outcome: GateOutcome
    reason: str
    numbers: Mapping[str, float]


def no_data(reason: str) -> Measurement:
    """Return the outcome of a measurement that found no value."""
    return Measurement(GateOutcome.NO_DATA, reason, {})


def verdict_of(
    run: PipelineRun, stage: PipelineStage, gate: str, measured: Measurement, now: float
) -> GateVerdict:
    """Return the stored form of a measurement in the current step, which must be reached."""
    return GateVerdict(
        gate=gate,
        step=run.step,
        at=now,
        outcome=measured.outcome,
        reason=measured.reason,
        numbers=dict(measured.numbers),
        after_soak=soaked_s(run, now) >= stage.soak_s,
    )


def evaluate_query(gate: QueryGate, series: Sequence[tuple[str, float]]) -> Measurement:
    """Return the outcome for the value of each series; every one must be within the bounds.

    Several series may have the same name, for instance those of one task with several handlers.
    """
    values = sorted((name, value) for name, value in series if isfinite(value))
    if not values:
        return no_data(f"the query returned no value ({len(series)} series)")
    low, high = gate.at_least, gate.at_most
    bad = [
        (name, value)
        for name, value in values
        if (high is not None and value > high) or (low is not None and value < low)
    ]
    given = (("at most", high), ("at least", low))
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in given if bound is not None)
    numbers = {
        "min": min(value for _, value in values),
        "max": max(value for _, value in values),
        "series": float(len(values)),
    }
    if bad:
        shown = ", ".join(f"{name} {value:g}" for name, value in bad[:_SHOWN])
        reason = f"{len(bad)} of {len(values)} values not {bounds}: {shown}"
        return Measurement(GateOutcome.FAIL, reason, numbers)
    reason = f"{len(values)} values {bounds}: {numbers['min']:g} to {numbers['max']:g}"
    return Measurement(GateOutcome.PASS, reason, numbers)


def evaluate_comparison(
    gate: CompareGate, new: Sequence[float], stable: Sequence[float]
) -> Measurement:
    """Return the outcome for samples of new and stable tasks."""
    new = [value for value in new if isfinite(value)]
    stable = [value for value in stable if isfinite(value)]
    counts = {"new_samples": float(len(new)), "stable_samples": float(len(stable))}
    if len(new) < gate.samples or len(stable) < gate.samples:
        reason = f"{len(new)} samples of new and {len(stable)} of stable tasks, of {gate.samples}"
        return Measurement(GateOutcome.NO_DATA, f"{reason} needed on each side", counts)
    test = compare_samples(new, stable, gate.tolerance, lower_is_better=gate.better == "lower")
    numbers = counts | {
        "new_median": test.new_median,
        "stable_median": test.stable_median,
        "p": test.p,
    }
    medians = f"median {test.new_median:g} on new, {test.stable_median:g} on stable tasks"
    detail = f"{medians}, p = {test.p:.2g} ({len(new)} and {len(stable)} samples)"
    if test.p < gate.significance:
        return Measurement(
            GateOutcome.FAIL, f"worse beyond {gate.tolerance:.0%}: {detail}", numbers
        )
    return Measurement(GateOutcome.PASS, detail, numbers)


def evaluate_health(
    gate: HealthGate, seen: Sequence[JobProgress], restarts_before: int
) -> Measurement:
    """Return the outcome for the new tasks of some jobs."""
    new = sum(job.new for job in seen)
    healthy = sum(job.new_healthy for job in seen)
    unhealthy = sum(job.new_unhealthy for job in seen)
    restarts = max(0, sum(job.restarts for job in seen) - restarts_before)
    numbers = {
        "new": float(new),
        "healthy": float(healthy),
        "unhealthy": float(unhealthy),
        "restarts": float(restarts),
    }
    detail = f"{healthy} of {new} new tasks healthy, {unhealthy} unhealthy,"
    detail += f" {restarts} restarts of {gate.restarts} allowed"
    if not new:
        return Measurement(GateOutcome.NO_DATA, "no task runs the new image", numbers)
    failed = unhealthy > 0 or restarts > gate.restarts
    return Measurement(GateOutcome.FAIL if failed else GateOutcome.PASS, detail, numbers)


def evaluate_http(
    expected: int, contains: str, status: int, text: str, took_s: float
) -> Measurement:
    """Return the outcome for an answer over HTTP."""
    numbers = {"status": float(status), "seconds": took_s}
    if status != expected:
        return Measurement(GateOutcome.FAIL, f"answered {status}, not {expected}", numbers)
    if contains not in text:
        return Measurement(GateOutcome.FAIL, f"the answer does not contain {contains!r}", numbers)
    return Measurement(GateOutcome.PASS, f"answered {status} in {took_s:.2f} s", numbers)
