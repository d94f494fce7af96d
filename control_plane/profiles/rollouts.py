"""Brings machines in use to a changed profile, and back if that fails (HP12, HP13).

The texts of profiles and one rollout per entitlement are stored. `core/rollout_steps.py` decides
the next steps from them and the state of the machines. The switcher does each single switch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from agent.api import Health, ProfileStatus, TaskState
from agent.api import ProfileState as Proof
from control_plane.agents.core.observed import is_empty
from control_plane.agents.region import Region
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.machine_commands import BeginEvent, EndEvents, WantProfile
from control_plane.api.machines import EventKind, MachineRecord, MachineState, UnavailabilityEvent
from control_plane.api.profiles import (
    ProfileProposal,
    ProfileRollout,
    ProfileState,
    ProfileStats,
    ProfileVersion,
    ProfileView,
    digest_of,
    version_name,
)
from control_plane.broker.core.unavailability import open_event
from control_plane.profiles.core.proposal import check_text
from control_plane.profiles.core.rollout_steps import (
    RolloutSteps,
    SwitchingMachine,
    is_under_way,
    is_unproved,
    next_steps,
    proved,
    target,
)
from control_plane.profiles.core.stats import stats_of
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.records import PROFILES, ROLLOUTS
from wire.errors import Conflict, InvalidInput, NotFound, TwineError

log = logging.getLogger(__name__)
_CHECKPOINT_EVERY = 50
"""Machines that are read between two checkpoints."""
_CHECK_S = 2.0
"""Interval between checks of the rollouts."""
_FAILING = (TaskState.BACKOFF, TaskState.FAILED)


class ProfileRollouts:
    """Owner of proposed profiles and of their rollouts."""

    def __init__(
        self,
        region: Region,
        entitlements: Table[EntitlementRecord],
        store: Store,
        keys: Mapping[str, Sequence[str]],
        writer: str = "",
    ) -> None:
        """`keys` has profile → patterns of the settings that owners may change.

        `writer` names this process if several processes write to the store.
        """
        self._broker, self._observations = region.broker, region.observations
        self._runtime, self._quarantine_s = region.runtime, region.settings.quarantine_s
        self._entitlements, self._keys, self._follows = entitlements, keys, region.follows
        self._versions: Table[ProfileVersion] = Table(
            store, PROFILES, ProfileVersion, "profile", writer=writer
        )
        self._rollouts: Table[ProfileRollout] = Table(
            store, ROLLOUTS, ProfileRollout, "profile rollout", writer=writer
        )
        self.tables = (self._versions, self._rollouts)
        self._proved: dict[str, tuple[int, float]] = {}
        """Machine → the generation of its profile that is proved, and since when."""
        self._waiting: dict[str, tuple[str, ...]] = {}
        """Entitlement → what the machines in trial wait for."""
        self._needs_boot: dict[str, str] = {}
        """Machine that waits for a boot or is being drained for its profile → its entitlement.
        A free machine is here only if an earlier release left its event open."""
        self._quarantined_for: dict[str, str] = {}
        """Machine → the profile for which it was quarantined."""
        region.broker.listen(self._machine_changed)

    async def load(self) -> None:
        """Read all profiles and rollouts."""
        await self._versions.load()
        await self._rollouts.load()

    async def run(self) -> None:
        """Advance rollouts until cancelled."""
        while True:
            for name in filter(
                self._follows, sorted({*self._rollouts, *self._needs_boot.values()})
            ):
                try:
                    await (self._advance(name) if name else self._end_events_of_released())
                except TwineError as e:  # the next check tries again
                    fields = {"entitlement": name, "reason": str(e)}
                    log.warning("check of a profile rollout failed", extra=fields)
            await self._runtime.sleep(_CHECK_S)

    # -- calls

    def text_of(self, profile: str) -> str:
        """Return the text of a proposed profile; empty for profiles that are installed on hosts."""
        version = self._versions.find(profile)
        return version.text if version is not None else ""

    def keeps(self, record: MachineRecord) -> bool:
        """Return whether a rollout keeps a machine with its entitlement."""
        rollout = self._rollouts.find(record.entitlement)
        if rollout is None or not is_under_way(rollout):
            return open_event(record, EventKind.PROFILE) is not None
        return record.machine in rollout.trial or record.profile_wanted == target(rollout)

    def show(self, entitlement: str) -> ProfileView:
        """Return the profile of an entitlement, and the progress of its rollout."""
        record = self._entitlement(entitlement)
        held = self._broker.held(entitlement)
        rollout = self._rollouts.find(entitlement)
        shown = rollout.name if rollout is not None else record.spec.host_profile
        waiting = self._waiting.get(entitlement, ()) if is_under_way(rollout) else ()
        proved_by = Counter(m.profile for m in held if m.profile_state is Proof.VERIFIED)
        del proved_by[""]
        return ProfileView(
            entitlement=entitlement,
            profile=record.spec.host_profile,
            rollout=rollout,
            machines=dict(sorted(Counter(m.profile_wanted for m in held).items())),
            proved=dict(sorted(proved_by.items())),
            waiting=list(waiting),
            text=self.text_of(shown),
        )

    async def stats(self) -> ProfileStats:
        """Return how long the last switches of hosts took."""
        reports = list[ProfileStatus]()
        for number, name in enumerate(self._broker.table):
            if number % _CHECKPOINT_EVERY == 0:
                await self._runtime.checkpoint()
            observation = self._observations.peek(name)
            if observation.answering:
                reports.append(observation.profile)
        return await self._runtime.offload(stats_of, reports)

    async def propose(
        self, entitlement: str, request: ProfileProposal, by: str, *, dry_run: bool = False
    ) -> ProfileView:
        """Begin the rollout of a profile to an entitlement; a repeated call changes nothing."""
        async with self._rollouts.lock(entitlement):
            record = self._entitlement(entitlement)
            root = self._checked_root(record, request.text)
            name, base = version_name(root, request.text), record.spec.host_profile
            known = self._rollouts.find(entitlement)
            if known is not None and is_under_way(known) and known.name != name:
                raise Conflict(
                    f"entitlement {entitlement!r} is changing to {target(known)}",
                    hint="twinectl profile status, or profile rollback",
                )
            is_known = known is not None and known.name == name and is_under_way(known)
            if dry_run or name == base or is_known:
                return self.show(entitlement)
            version = ProfileVersion(
                name=name,
                digest=digest_of(request.text),
                extends=root,
                text=request.text,
                entitlement=entitlement,
                by=by,
                at=self._runtime.date(),
                reason=request.reason,
            )
            await self._keep_version(version)
            if known is not None and self._is_unproved(known):
                base = known.base
            await self._rollouts.commit(entitlement, _rollout(version, base, request))
        log.info("profile proposed", extra={"entitlement": entitlement, "profile": name})
        return self.show(entitlement)

    def _checked_root(self, record: EntitlementRecord, text: str) -> str:
        """Return the installed profile that a proposed text extends; raise if it is refused."""
        entitlement, spec = record.name, record.spec
        if spec.materialization:
            raise InvalidInput(
                f"the machines of {entitlement!r} are those of {spec.materialization!r}",
                hint="propose the profile for that entitlement",
            )
        current = self._versions.find(spec.host_profile)
        root = current.extends if current is not None else spec.host_profile
        if errors := check_text(text, root, self._keys.get(root, ())):
            listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
            raise InvalidInput(
                f"the profile for {entitlement!r} is refused: {listed}", errors=tuple(errors)
            )
        return root

    async def _keep_version(self, version: ProfileVersion) -> None:
        """Store a version of a profile, unless it is stored."""
        if self._versions.find(version.name) is None:
            async with self._versions.lock(version.name):
                await self._versions.commit(version.name, version)

    async def roll_back(self, entitlement: str, by: str) -> ProfileView:
        """Roll machines back to the profile before the last proposal."""
        self._entitlement(entitlement)
        async with self._rollouts.lock(entitlement):
            known = self._rollouts.find(entitlement)
            if known is None or known.state is ProfileState.RETURNED:
                raise Conflict(
                    f"entitlement {entitlement!r} has no previous profile",
                    hint="twinectl profile status",
                )
            if known.state is not ProfileState.BACK:
                reason = f"{by} requested {known.base} again"
                changed = replace(known, state=ProfileState.BACK, reason=reason, trial=())
                await self._rollouts.commit(entitlement, changed)
        return self.show(entitlement)

    def _entitlement(self, name: str) -> EntitlementRecord:
        if (record := self._entitlements.find(name)) is None:
            raise NotFound(f"there is no entitlement {name!r}")
        return record

    # -- one entitlement

    def _machine_changed(
        self, name: str, _before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        waits = after is not None and (
            (after.entitlement and after.profile_state is Proof.PENDING_REBOOT)
            or open_event(after, EventKind.PROFILE) is not None
        )
        if after is not None and waits:
            self._needs_boot[name] = after.entitlement
        else:
            self._needs_boot.pop(name, None)
        if after is not None and after.quarantined_profile:
            self._quarantined_for[name] = after.quarantined_profile
        else:
            self._quarantined_for.pop(name, None)
        if after is None:
            self._proved.pop(name, None)

    async def _advance(self, name: str) -> None:
        """Take the next step for one entitlement."""
        async with self._rollouts.lock(name):
            known = self._rollouts.find(name)
            if self._entitlements.find(name) is None:
                if known is not None:
                    await self._rollouts.commit(name, None)
                return
            hosts = [self._observe(record) for record in self._broker.held(name)]
            lost = self._quarantined(known) if known is not None else []
            if known is not None and self._is_unproved(known):
                await self._store_progress(known, proved(known, hosts, lost))
            if known is None or not is_under_way(known):
                await self._drain_for_boot(hosts)
                return
            step = next_steps(known, hosts, lost, self._runtime.date())
            self._waiting[name] = step.waiting
            await self._store_progress(known, step.rollout)
        await self._carry_out(name, step)

    def _is_unproved(self, rollout: ProfileRollout | None) -> bool:
        """Return whether the entitlement has a profile that none of its machines has reached."""
        if rollout is None or not is_unproved(rollout):
            return False
        return self._entitlement(rollout.entitlement).spec.host_profile == rollout.name

    def _quarantined(self, rollout: ProfileRollout) -> list[str]:
        """Return the machines that were quarantined for the profile since the rollout began."""
        ends_after = rollout.at + self._quarantine_s
        return [
            record.machine
            for machine, profile in self._quarantined_for.items()
            if profile == rollout.name
            and (record := self._broker.table.find(machine)) is not None
            and record.quarantined_until > ends_after
        ]

    async def _store_progress(self, known: ProfileRollout, after: ProfileRollout) -> None:
        """Store the progress of a rollout, and the entitlement's profile once that changes."""
        if after.state in (ProfileState.DONE, ProfileState.BACK):
            await self._set_profile(known.entitlement, target(after))
        if after == known:
            return
        await self._rollouts.commit(known.entitlement, after)
        if after.state is not known.state:
            fields = {"entitlement": known.entitlement, "profile": target(after)}
            fields["state"] = after.state.value
            log.info("profile rollout continues", extra=fields)

    async def _drain_for_boot(self, hosts: Sequence[SwitchingMachine]) -> None:
        """Drain one machine that waits for a boot; end the drains of machines that switched."""
        for host in hosts:
            if host.leaving and host.proof is Proof.VERIFIED:
                await self._end_drain(host.name)
        waits = [h for h in hosts if h.proof is Proof.PENDING_REBOOT and h.up]
        if waits and not any(host.leaving for host in hosts) and not waits[0].empty:
            await self._begin_drain(waits[0].name, waits[0].wanted)

    async def _end_events_of_released(self) -> None:
        """End the profile events of machines that no longer belong to an entitlement."""
        for machine in [name for name, where in self._needs_boot.items() if not where]:
            await self._end_drain(machine)

    async def _carry_out(self, entitlement: str, step: RolloutSteps) -> None:
        wanted = target(step.rollout)
        for machine in step.switch:
            await self._broker.carry_out(
                machine, WantProfile(entitlement=entitlement, profile=wanted)
            )
            self._observations.changed(machine)
        for machine in step.drain:
            await self._begin_drain(machine, wanted)
        for machine in step.give_back:
            await self._end_drain(machine)

    async def _begin_drain(self, machine: str, profile: str) -> None:
        """Begin to drain a machine whose switch needs it empty."""
        now = self._runtime.date()
        event = UnavailabilityEvent(
            event_id=f"{machine}-profile-{now:.3f}",
            kind=EventKind.PROFILE,
            reason=f"it is changing to profile {profile}",
            start=now,
        )
        await self._broker.carry_out(machine, BeginEvent(event=event))
        log.info("machine emptied for its profile", extra={"machine": machine})

    async def _end_drain(self, machine: str) -> None:
        await self._broker.carry_out(machine, EndEvents(kinds=[EventKind.PROFILE]))

    async def _set_profile(self, name: str, profile: str) -> None:
        """Set the profile of an entitlement and of the reservations on its machines."""
        for record in self._entitlements.records():
            spec = record.spec
            if name in (record.name, spec.materialization) and spec.host_profile != profile:
                await self._entitlements.update(
                    record.name,
                    lambda r: replace(
                        r,
                        spec=replace(r.spec, host_profile=profile),
                        generation=r.generation + 1,
                    ),
                )

    def _observe(self, record: MachineRecord) -> SwitchingMachine:
        name, observation = record.machine, self._observations.observation(record.machine)
        up = record.state is MachineState.UP and observation.answering
        seen, generation = observation.profile, record.assignment_generation
        is_current = (seen.generation, seen.name) == (generation, record.profile_wanted)
        proof = seen.state if up and is_current else Proof.NONE
        now = self._runtime.now()
        if proof is Proof.VERIFIED and record.profile_state is Proof.VERIFIED:
            if self._proved.get(name, (0, 0.0))[0] != generation:
                self._proved[name] = (generation, now)
        else:
            self._proved.pop(name, None)
            proof = Proof.APPLYING if proof is Proof.VERIFIED else proof
        since = self._proved.get(name)
        well = all(
            status.health is not Health.UNHEALTHY and status.state not in _FAILING
            for status in observation.tasks.values()
        )
        return SwitchingMachine(
            name=name,
            wanted=record.profile_wanted,
            proof=proof,
            empty=is_empty(observation.tasks),
            up=up,
            leaving=open_event(record, EventKind.PROFILE) is not None,
            well=well,
            proved_s=now - since[1] if since is not None else 0.0,
        )


def _rollout(version: ProfileVersion, base: str, request: ProfileProposal) -> ProfileRollout:
    """Return the rollout of a version; machines go back to `base` if it fails."""
    return ProfileRollout(
        entitlement=version.entitlement,
        name=version.name,
        base=base,
        at_once=request.at_once,
        gate_s=request.gate_s,
        failures=request.failures,
        reason=version.reason,
        by=version.by,
        at=version.at,
    )
