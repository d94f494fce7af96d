"""Failures that only the control plane has; the tree's root is in `agent.errors`.

TwineError
└── Unprocessable
    ├── NoCapacity      an entitlement asks for more than the region has
    └── QuotaExceeded   a job asks for more than its entitlement may use
"""

from agent.errors import Unprocessable


class NoCapacity(Unprocessable):
    """The region has less than what is asked for."""

    code = "no_capacity"


class QuotaExceeded(Unprocessable):
    """An entitlement may use less than what is asked for."""

    code = "quota_exceeded"
