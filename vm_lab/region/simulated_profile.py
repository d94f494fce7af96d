"""The host profile of a modelled machine: switching it, and changes by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent import api
from agent.api import ProfileState

if TYPE_CHECKING:
    from vm_lab.region.machine import SimulatedMachine

FAILS = "# no host can reach this one"
"""In the text of a profile that no host can apply."""


class SimulatedProfile:
    """The desired host profile of a machine, and the reported state."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.status = api.ProfileStatus()
        self.wanted: api.ProfileSpec | None = None
        self.drifted_at = float("-inf")
        self._booted_for = ""
        """The desired profile at the last boot."""
        self._switches = 0

    def switch(self, spec: api.ProfileSpec, *, booted: bool = False) -> None:
        """Bring the host to a profile."""
        self.wanted = spec
        self._switches += 1
        self._become(ProfileState.APPLYING)
        if booted:
            self._booted_for = spec.name
        # a setting that was changed by hand is corrected without a boot
        proposed = spec.name.rpartition("-")[0] if spec.text else spec.name
        needs_boot = (
            proposed in self._machine.context.reboot_profiles and spec.name != self._booted_for
        )
        timeline = self._machine.context.timeline
        timeline.after(
            self._machine.draw(self._machine.pace.switch),
            self._switched,
            self._switches,
            self._machine.power_changes,
            needs_boot,
        )

    def _switched(self, switches: int, power_changes: int, needs_boot: bool) -> None:
        spec = self.wanted
        if spec is None or (switches, power_changes) != (
            self._switches,
            self._machine.power_changes,
        ):
            return
        if FAILS in spec.text:
            self._become(ProfileState.DEGRADED)
            return
        if not needs_boot:
            self._become(ProfileState.VERIFIED)
            return
        self._become(ProfileState.PENDING_REBOOT)
        if spec.allow_reboot and not any(copy.alive for copy in self._machine.copies.values()):
            self._machine.context.timeline.after(
                1.0, self._reboot_for_profile, switches, power_changes
            )

    def _reboot_for_profile(self, switches: int, power_changes: int) -> None:
        if (switches, power_changes) == (self._switches, self._machine.power_changes):
            self._machine.reboot()

    def drift(self) -> None:
        """Change a setting of the host by hand."""
        if self.status.state is ProfileState.VERIFIED:
            self.drifted_at = self._machine.context.timeline.now
            self._become(ProfileState.DRIFTED)

    def _become(self, state: ProfileState) -> None:
        spec = self.wanted
        assert spec is not None
        self.status = api.ProfileStatus(
            name=spec.name,
            generation=spec.generation,
            epoch=spec.epoch,
            state=state,
            boot_id=self._machine.boot_id(),
        )
        self._machine.context.history.note(f"{self._machine.name} profile {spec.name} {state}")
        if self._machine.agent_up:
            self._machine.add_event("profile", spec.name)
