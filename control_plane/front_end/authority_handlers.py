"""Handlers of the rows about the certificate authority."""

from __future__ import annotations

from control_plane.api.authority import AuthorityView
from control_plane.identity.rotation import Rotation
from wire.server import Call


class AuthorityHandlers:
    """Part of the front end."""

    def __init__(self, rotation: Rotation) -> None:
        """Take who changes the roots."""
        self._rotation = rotation

    async def get_roots(self, _: Call) -> AuthorityView:
        """Show the roots, and who goes along."""
        return await self._rotation.view()

    async def step_roots(self, call: Call) -> AuthorityView:
        """Take a step of a rotation."""
        return await self._rotation.take(call.body.step, force=call.body.force)
