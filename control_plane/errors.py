"""Failures that only the control plane has; the tree's root is in `wire.errors`.

TwineError
├── UnknownOutcome      the store does not say whether a write was made
└── Unprocessable
    └── QuotaExceeded   a job asks for more than its entitlement may use
"""

from wire.errors import TwineError, Unprocessable


class UnknownOutcome(TwineError):
    """A write was made, was not, or will be: `store.outcomes` finds out which."""

    code = "unknown_outcome"
    status = 503
    retryable = True
    exit_code = 75


class QuotaExceeded(Unprocessable):
    """An entitlement may use less than is requested."""

    code = "quota_exceeded"
