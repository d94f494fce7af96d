"""Whether the lab is at rest: nothing is under way in it, and nothing is to come by itself.

A job that is `stable` has all its tasks healthy at this moment. It may still be about to move
them: for an even spread, once it was quiet for a minute; off a machine that is drained; back,
when a machine is trusted again. A test that takes such a moment for how things stand is red
whenever the machine it runs on is slower than its author's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_ANSWERS = ("does not answer", "answers")
_FIRST = "proposed"
"""The state of an operation that does not say its own: what is the default is not printed."""


def unrest(machines: list[dict[str, Any]], jobs: list[dict[str, Any]]) -> list[str]:
    """Return what is still to come, in words; empty: everything stays as it is.

    `machines` as `twinectl machine list`, `jobs` as `twinectl job status` shows them in JSON.
    """
    found = unusable(machines)
    for machine in machines:
        if machine["record"]["entitlement"] and not machine["tasks"]:
            found.append(f"{_name(machine)}: held without a task, it is given back soon")
    for job in jobs:
        reasons = [*_of_job(job), *filter(None, [uneven(machines, job)])]
        found += [f"job {job['record']['name']}: {why}" for why in reasons]
    return found


def unusable(machines: list[dict[str, Any]]) -> list[str]:
    """Return which machines do not take tasks, or not for long, and why."""
    return [f"{_name(m)}: {why}" for m in machines for why in _of_machine(m)]


def uneven(machines: list[dict[str, Any]], job: dict[str, Any]) -> str:
    """Return how many tasks stand where, if moving one would make that more even."""
    counts = Counter({_name(m): 0 for m in machines})
    counts.update(t["placement"]["machine"] for t in job["record"]["tasks"] if t["placement"])
    if max(counts.values()) - min(counts.values()) < 2:
        return ""
    return "unevenly spread: " + ", ".join(f"{n} on {m}" for m, n in sorted(counts.items()))


def _name(machine: dict[str, Any]) -> str:
    return str(machine["record"]["machine"])


def _of_machine(machine: dict[str, Any]) -> list[str]:
    record, found = machine["record"], []
    if record["state"] != "up" or not machine["ready"]:
        found.append(f"{record['state']}, its agent {_ANSWERS[machine['ready']]}")
    if machine["health"]:
        found.append(machine["health"])
    proved = record["profile"] if record["profile_state"] == "verified" else None
    if record["entitlement"] and proved != record["profile_wanted"]:
        found.append(f"profile {record['profile_wanted']}: {record['profile_state']}")
    for event in record["unavailability"]:
        if event["end"] is None:
            found.append(f"{event['kind']}: {event['reason']}")
    if record["hold"]:
        found.append(f"held for transaction {record['hold']['transaction']}")
    if record["loan"]:
        found.append("lent")
    return found


def _of_job(job: dict[str, Any]) -> list[str]:
    record, found = job["record"], []
    if job["phase"] != "stable":
        found.append(f"{job['phase']}, {job['healthy']} of {job['wanted']} healthy")
    if job["detail"]:
        found.append(job["detail"])
    for task in record["tasks"]:
        if (operation := task["operation"]) is not None:
            found.append(
                f"task {task['index']}: {operation['kind']} is {operation.get('state', _FIRST)}"
            )
    for machine, tasks in record["leaving"].items():
        found.append(f"{', '.join(tasks)} must still go from {machine}")
    return found
