"""Decides the steps of a rollout of a proposed profile to machines in use, a few at a time.

If the rollout fails, all machines go back. The way of one machine:

    due -> in trial: requested, while its tasks run -> proved -> healthy for `gate_s` -> done
                     tasks prevent the switch -> drained -> requested again -> tasks may return
                     not reached, or unhealthy afterwards -> failed -> all machines roll back

Tasks leave by operations as for maintenance: within the budgets of their jobs and approved by their
task controllers. There are no deadlines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from agent.api import ProfileState as Proof
from control_plane.api.profiles import ProfileRollout, ProfileState

_IN_THE_WAY = (Proof.PENDING_REBOOT, Proof.DEGRADED)
"""States in which tasks on the machine may block the switch: it needs a boot, or was refused."""


@dataclass(frozen=True, slots=True)
class SwitchingMachine:
    """A machine of the entitlement, in its present state."""

    name: str
    wanted: str
    """The profile that its record wants."""
    proof: Proof = Proof.NONE
    """The state of this profile on the machine."""
    empty: bool = True
    up: bool = True
    leaving: bool = False
    """Whether it is being drained for the switch."""
    well: bool = True
    """Whether no task there is unhealthy or failing."""
    proved_s: float = 0.0
    """Seconds since its profile was proved; a restart of this process counts from zero again."""


@dataclass(frozen=True, slots=True)
class RolloutSteps:
    """The next steps of a rollout."""

    rollout: ProfileRollout
    switch: tuple[str, ...] = ()
    """Machines that get a request for `target`."""
    drain: tuple[str, ...] = ()
    give_back: tuple[str, ...] = ()
    """Machines to which tasks may return."""
    waiting: tuple[str, ...] = field(default=())
    """What the machines in trial wait for, one sentence each."""


def target(rollout: ProfileRollout) -> str:
    """Return the profile that the machines should have in the end."""
    forward = rollout.state in (ProfileState.ROLLING, ProfileState.DONE)
    return rollout.name if forward else rollout.base


def is_under_way(rollout: ProfileRollout | None) -> bool:
    """Return whether machines are being switched, to the new profile or back."""
    return rollout is not None and rollout.state in (ProfileState.ROLLING, ProfileState.BACK)


def next_steps(
    rollout: ProfileRollout, hosts: Sequence[SwitchingMachine], lost: Collection[str], now: float
) -> RolloutSteps:
    """Return the next steps; `lost` are machines quarantined for not reaching the profile."""
    known = {host.name: host for host in hosts}
    rollout = _with_failures(rollout, known, lost)
    if rollout.state is ProfileState.ROLLING:
        rollout = _back_if_failed(rollout)
    wanted = target(rollout)
    trial = [
        n for n in rollout.trial if n in known and not _is_trial_over(known[n], rollout, wanted)
    ]
    leaving = {host.name for host in hosts if host.leaving}
    back = tuple(sorted(leaving & {h.name for h in hosts if _is_proved(h, wanted)}))
    due = [h for h in hosts if h.wanted != wanted and h.name not in trial and h.up]
    due.sort(key=lambda host: (not host.empty, host.name))
    room = max(0, rollout.at_once - len(trial))
    trial += [host.name for host in due[:room]]
    in_trial = [known[name] for name in trial]
    switch = tuple(host.name for host in in_trial if host.wanted != wanted)
    drain = tuple(
        host.name
        for host in in_trial
        if host.wanted == wanted
        and host.proof in _IN_THE_WAY
        and not host.empty
        and not host.leaving
    )
    waiting = tuple(_describe(host, wanted) for host in in_trial)
    rollout = replace(rollout, trial=tuple(trial))
    if not trial and not any(host.wanted != wanted for host in hosts):
        ends = rollout.state is ProfileState.ROLLING
        state = ProfileState.DONE if ends else ProfileState.RETURNED
        unproved = ends and not any(_is_proved(host, wanted) for host in hosts)
        rollout = replace(rollout, state=state, ended=now, unproved=unproved)
    return RolloutSteps(rollout, switch, drain, back, waiting)


def proved(
    rollout: ProfileRollout, hosts: Sequence[SwitchingMachine], lost: Collection[str]
) -> ProfileRollout:
    """Return a rollout that ended without proof, updated from the machines that joined since.

    A machine that reaches the profile proves it. If too many machines fail, the entitlement goes
    back to its earlier profile; otherwise no machine could ever join it.
    """
    if not is_unproved(rollout):
        return rollout
    if any(_is_proved(host, rollout.name) for host in hosts):
        return replace(rollout, unproved=False)
    failed = tuple(dict.fromkeys([*rollout.failed, *sorted(lost)]))
    return _back_if_failed(rollout if failed == rollout.failed else replace(rollout, failed=failed))


def is_unproved(rollout: ProfileRollout) -> bool:
    """Return whether a rollout is done although no machine has proved the profile."""
    return rollout.state is ProfileState.DONE and rollout.unproved


def _back_if_failed(rollout: ProfileRollout) -> ProfileRollout:
    """Return the rollout, in state `back` if too many machines have failed."""
    if len(rollout.failed) < rollout.failures:
        return rollout
    listed = ", ".join(rollout.failed[:3])
    reason = f"{rollout.name} failed on {listed}: rolling back to {rollout.base}"
    return replace(rollout, state=ProfileState.BACK, reason=reason, unproved=False)


def _with_failures(
    rollout: ProfileRollout, known: dict[str, SwitchingMachine], lost: Collection[str]
) -> ProfileRollout:
    """Return the rollout with the machines that have failed so far."""
    if rollout.state is not ProfileState.ROLLING:
        return rollout
    unhealthy = [
        name
        for name in rollout.trial
        if (host := known.get(name)) is not None
        and _is_proved(host, rollout.name)
        and host.proved_s >= rollout.gate_s
        and not host.well
    ]
    failed = tuple(dict.fromkeys([*rollout.failed, *sorted(lost), *unhealthy]))
    return replace(rollout, failed=failed) if failed != rollout.failed else rollout


def _is_proved(host: SwitchingMachine, wanted: str) -> bool:
    return host.wanted == wanted and host.proof is Proof.VERIFIED


def _is_trial_over(host: SwitchingMachine, rollout: ProfileRollout, wanted: str) -> bool:
    """Return whether a machine's trial is over; a rollback has no gate."""
    if not _is_proved(host, wanted):
        return False
    if rollout.state is ProfileState.BACK:
        return True
    return host.proved_s >= rollout.gate_s and host.well


def _describe(host: SwitchingMachine, wanted: str) -> str:
    if not host.up:
        return f"{host.name} is down"
    if host.wanted != wanted:
        return f"{host.name} is asked for {wanted}"
    if host.proof is Proof.VERIFIED:
        well = "" if host.well else "; tasks there are unhealthy"
        return f"{host.name} proved it {host.proved_s:.0f} s ago{well}"
    if host.leaving and not host.empty:
        return f"{host.name}: its tasks leave"
    return f"{host.name}: {host.proof}"
