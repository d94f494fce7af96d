"""Errors of the lab, each with a hint."""

from wire.errors import TwineError


class LabError(TwineError):
    """The lab cannot carry out a request. Any other exception is a bug."""

    code = "lab"
