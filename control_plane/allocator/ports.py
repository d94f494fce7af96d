"""Protocols of the portal's services that the allocator calls.

`roles.py` passes the portal in; without a control plane, `standalone.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.settings import PortalSettings
from control_plane.runtime.table import Table


class Grants(Protocol):
    """How much each entitlement may use: the portal."""

    @property
    def table(self) -> Table[EntitlementRecord]:
        """Return the records of all entitlements."""

    @property
    def settings(self) -> PortalSettings:
        """Return the rules for grants."""

    def specs(self) -> Mapping[str, EntitlementSpec]:
        """Return the granted specification of every entitlement."""
