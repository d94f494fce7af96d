"""The front end's handlers about host profiles that change."""

from __future__ import annotations

from control_plane.api.profiles import ProfileStats, ProfileView
from control_plane.profiles.rollouts import ProfileRollouts
from wire.peers import principal
from wire.server import Call


class ProfileHandlers:
    """A handler for each row of `api.profile_routes`."""

    def __init__(self, profiles: ProfileRollouts) -> None:
        """Take what the handlers call."""
        self._profiles = profiles

    async def propose_profile(self, call: Call) -> ProfileView:
        """Begin to bring machines to another profile."""
        return await self._profiles.propose(
            call.path["entitlement"], call.body, _who(call), dry_run=call.flag("dry_run")
        )

    async def get_profile_rollout(self, call: Call) -> ProfileView:
        """Show how far that is."""
        return self._profiles.show(call.path["entitlement"])

    async def rollback_profile(self, call: Call) -> ProfileView:
        """Bring them back."""
        return await self._profiles.go_back(call.path["entitlement"], _who(call))

    async def profile_stats(self, _: Call) -> ProfileStats:
        """Say how long switches take."""
        return self._profiles.stats()


def _who(call: Call) -> str:
    return principal(call.peer) if call.peer.role == "user" else call.peer.name
