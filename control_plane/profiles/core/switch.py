"""Decides the next step that brings an assigned machine to its entitlement's profile.

No task runs on the machine before the profile is verified (HP15). A machine that cannot reach the
profile is quarantined, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent.api import ProfileState, ProfileStatus
from control_plane.api.machines import MachineRecord


class Step(StrEnum):
    """What to do next about a machine's profile."""

    NOTHING = "nothing"
    """The machine has its profile, or is free."""
    SEND = "send"
    """Send the agent a request for the profile."""
    RAISE = "raise"
    """Request it again under a higher generation: the agent considers the last request done."""
    WAIT = "wait"
    """The agent is applying the profile."""
    WAIT_REBOOT = "wait-reboot"
    """The machine is about to reboot for the profile; that does not count as a failure."""
    RECORD = "record"
    """The agent verified the profile: store that."""
    QUARANTINE = "quarantine"
    """The machine cannot reach the profile."""


@dataclass(frozen=True, slots=True)
class Switch:
    """The next step, and why."""

    step: Step
    reason: str = ""


def next_step(
    record: MachineRecord, seen: ProfileStatus, *, empty: bool, requested_with_tasks: bool = False
) -> Switch:
    """Return the next step towards the machine's profile; `empty`: no task is alive there.

    `requested_with_tasks` is true if tasks were alive at the last request: they may have kept the
    agent from booting, or may be why it refused the profile.
    """
    if not record.entitlement:
        return Switch(Step.NOTHING)
    if seen.generation > record.assignment_generation:
        return Switch(Step.RAISE, f"the agent is at generation {seen.generation}")
    if seen.generation < record.assignment_generation or seen.name != record.profile_wanted:
        return Switch(Step.SEND)
    match seen.state:
        case ProfileState.VERIFIED:
            is_verified = record.profile_state is ProfileState.VERIFIED
            is_recorded = is_verified and record.profile == seen.name
            return Switch(Step.NOTHING if is_recorded else Step.RECORD)
        case ProfileState.APPLYING:
            return Switch(Step.WAIT)
        case ProfileState.PENDING_REBOOT | ProfileState.DEGRADED if empty and requested_with_tasks:
            return Switch(Step.RAISE, f"tasks no longer block it: {seen.detail}")
        case ProfileState.PENDING_REBOOT:
            if empty:
                return Switch(Step.WAIT_REBOOT, "settings take effect at the next boot")
            return Switch(Step.WAIT, "it needs a reboot, but tasks still run there")
        case ProfileState.DRIFTED:
            return Switch(Step.RAISE, f"settings drifted: {seen.detail}")
        case ProfileState.DEGRADED:
            return Switch(Step.QUARANTINE, seen.detail or "the agent reports it as degraded")
        case ProfileState.NONE:
            return Switch(Step.SEND)
