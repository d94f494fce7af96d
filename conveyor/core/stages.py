"""The steps of a run: which stage on which jobs, and the number of tasks in each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.api.intents import PushIntent
from conveyor.api import JobOrder, PipelineGate, PipelineSpec, PipelineStage, StageKind


@dataclass(frozen=True, slots=True)
class DeliveryStep:
    """One stage on some of the jobs."""

    name: str
    stage: PipelineStage
    jobs: tuple[str, ...]


def steps(spec: PipelineSpec) -> tuple[DeliveryStep, ...]:
    """Return the steps of a run, in order."""
    if spec.order is JobOrder.TOGETHER or len(spec.targets) == 1:
        jobs = tuple(spec.targets)
        return tuple(DeliveryStep(stage_name(stage), stage, jobs) for stage in spec.stages)
    return tuple(
        DeliveryStep(f"{job}: {stage_name(stage)}", stage, (job,))
        for job in spec.targets
        for stage in spec.stages
    )


def stage_name(stage: PipelineStage) -> str:
    """Return a stage in a word: `canary 1`, `50 %`, `all`."""
    if stage.kind is StageKind.CANARY:
        return f"canary {stage.tasks}"
    return f"{stage.percent:g} %" if stage.kind is StageKind.PERCENT else "all"


def wanted(stage: PipelineStage, size: int) -> int:
    """Return how many of `size` tasks run the new image in a stage, rounded as in job control."""
    return push_of(stage).of(size)


def step_text(step: DeliveryStep, sizes: Mapping[str, int]) -> str:
    """Return what a step does, in a line, at these sizes of its jobs."""
    stage = step.stage
    counts = ", ".join(f"{job} {wanted(stage, sizes[job])} of {sizes[job]}" for job in step.jobs)
    gates = ", ".join(stage.gates) or "no gate"
    return f"{stage_name(stage)}: {counts}; soak {stage.soak_s:g} s; {gates}"


def push_of(stage: PipelineStage) -> PushIntent:
    """Return the push that a stage writes; the caller sets the version."""
    if stage.kind is StageKind.CANARY:
        return PushIntent(version=0, tasks=stage.tasks or 1)
    if stage.kind is StageKind.PERCENT and stage.percent is not None:
        return PushIntent(version=0, share=stage.percent / 100)
    return PushIntent(version=0)


def stage_gates(spec: PipelineSpec, stage: PipelineStage) -> dict[str, PipelineGate]:
    """Return the gates of a stage by name, in order."""
    return {name: spec.gates[name] for name in stage.gates}
