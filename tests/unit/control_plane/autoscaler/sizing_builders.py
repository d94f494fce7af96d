"""Policies and observations with defaults."""

from __future__ import annotations

from typing import Any

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, LoadSignal, SpeedLimit
from control_plane.autoscaler.core.observing import JobObservation

NOON = 20_000 * 86_400.0 + 43_200.0
"""A Friday at noon."""


def a_policy(**changes: Any) -> Autoscale:
    given: dict[str, Any] = {
        "minimum": 2,
        "maximum": 100,
        "target": 0.5,
        "mode": AutoscaleMode.APPLY,
        "signal": LoadSignal.CPU,
        "headroom": Headroom.NONE,
        "up": SpeedLimit(share=1.0, per_s=300.0),
        "down": SpeedLimit(share=0.1, per_s=600.0),
    }
    return Autoscale(**given | changes)


def seen(load: float | None, tasks: int = 10, at: float = NOON, **changes: Any) -> JobObservation:
    given: dict[str, Any] = {
        "at": at,
        "tasks": tasks,
        "healthy": tasks,
        "capacity": 2.0,
        "load": load,
        "measured_at": at,
    }
    return JobObservation(**given | changes)
