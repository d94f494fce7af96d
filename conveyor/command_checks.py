"""Gates that run a command: each check is a job of one task that runs once.

The job is named after the pipeline and the gate. A variable of its environment identifies the run,
the step and whether the soak was over, so that a result is never counted for another check.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import Health, Limits, RestartPolicy, RestartWhen, TaskState, exit_text
from control_plane.api.job_life import JobLife
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.client import ControlPlaneClient
from conveyor.api import CommandGate
from conveyor.core import evaluation
from conveyor.core.evaluation import Measurement
from conveyor.core.stages import steps
from conveyor.runs import GateOutcome, JobProgress, PipelineRun
from wire.errors import NotFound

CHECK_VARIABLE = "PIPELINE_CHECK"
"""Environment variable with the id of a check; other jobs do not have it."""
_MACHINE_CAUSED = ("lost", "cut-off", "evicted", "oomd-kill")
"""Results that the machine causes, and not the command."""


class CommandChecks:
    """Runs the commands of gates, each as a task."""

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client = client

    async def measure(
        self, name: str, run: PipelineRun, jobs: Sequence[JobProgress], now: float
    ) -> Measurement | None:
        """Return the outcome of a command once it has ended; None: it starts or runs."""
        gate = run.spec.gates[name].command
        assert gate is not None
        is_soaked = evaluation.soaked_s(run, now) >= steps(run.spec)[run.step].stage.soak_s
        check_id = f"{run.number}.{len(run.steps)}.{'after' if is_soaked else 'in'}-soak"
        job = check_job_name(run.spec.name, name)
        try:
            record = (await self._client.get_job(job)).record
        except NotFound:
            base = (await self._client.get_job(jobs[0].job)).record.spec
            spec = _check_spec(job, gate, base, run, check_id, jobs)
            await self._client.apply_job(spec, is_new=True)
            return None
        running_id = record.spec.environment.get(CHECK_VARIABLE)
        if running_id is None:
            return evaluation.no_data(f"job {job} is not a check of a pipeline: rename the gate")
        if record.stopping:
            return None
        outcome = outcome_of(record) if running_id == check_id else None
        if outcome is not None or running_id != check_id:
            await self._client.stop_job(job)
        return outcome

    async def end(self, run: PipelineRun) -> None:
        """Stop the remaining checks of a run that ended."""
        for name, gate in run.spec.gates.items():
            if gate.command is None:
                continue
            job = check_job_name(run.spec.name, name)
            try:
                record = (await self._client.get_job(job)).record
            except NotFound:
                continue
            if record.spec.environment.get(CHECK_VARIABLE, "").startswith(f"{run.number}."):
                await self._client.stop_job(job)


def check_job_name(pipeline: str, gate: str) -> str:
    """Return the name of the job in which a gate's command runs."""
    return f"{pipeline}-check-{gate}"


def outcome_of(record: JobRecord) -> Measurement | None:
    """Return the result of a check that has ended; None: it runs, or waits for a machine."""
    for task in record.tasks:
        last = task.last_exit
        if task.state is TaskState.FAILED and last is None:
            return Measurement(
                GateOutcome.FAIL, f"the command cannot be started: {task.reason}", {}
            )
        if task.state not in (TaskState.STOPPED, TaskState.FAILED) or last is None:
            continue
        if last.result in _MACHINE_CAUSED:
            return evaluation.no_data(f"the command ended abnormally: {exit_text(last)}")
        numbers = {} if last.code is None else {"exit": float(last.code)}
        is_good = last.result == "success" and task.health is not Health.UNHEALTHY
        outcome = GateOutcome.PASS if is_good else GateOutcome.FAIL
        return Measurement(outcome, f"the command ended: {exit_text(last)}", numbers)
    return None


def _check_spec(
    job: str,
    gate: CommandGate,
    base: JobSpec,
    run: PipelineRun,
    check_id: str,
    jobs: Sequence[JobProgress],
) -> JobSpec:
    environment = {
        **gate.environment,
        CHECK_VARIABLE: check_id,
        "PIPELINE": run.spec.name,
        "PIPELINE_RUN": str(run.number),
        "PIPELINE_IMAGE": run.image,
        "PIPELINE_NEW_TASKS": " ".join(task for progress in jobs for task in progress.new_tasks),
        "PIPELINE_STABLE_TASKS": " ".join(
            task for progress in jobs for task in progress.stable_tasks
        ),
    }
    return JobSpec(
        name=job,
        entitlement=gate.entitlement or base.entitlement,
        tasks=1,
        image=gate.image or run.image,
        command=gate.run,
        environment=environment,
        limits=Limits(memory_max_bytes=gate.memory_max_bytes),
        restart=RestartPolicy(when=RestartWhen.NEVER),
        life=JobLife(max_run_s=gate.timeout_s),
    )
