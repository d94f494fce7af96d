"""What the handlers of all subjects share."""

from __future__ import annotations

from agent.api import Liveness
from control_plane.roles import ControlPlane
from wire.server import Call


class PlaneHandlers:
    """Base of the handlers of each subject; they call the services of one control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def healthz(self, _: Call) -> Liveness:
        """Answer that this process is alive."""
        return Liveness(ok=True)
