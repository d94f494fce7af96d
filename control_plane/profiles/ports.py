"""Protocols of the portal's services that profile rollouts call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.runtime.table import Table


class Entitlements(Protocol):
    """Entitlements and their quotas: the portal."""

    @property
    def table(self) -> Table[EntitlementRecord]:
        """Return the records of all entitlements."""

    def specs(self) -> Mapping[str, EntitlementSpec]:
        """Return the specification of every entitlement."""
