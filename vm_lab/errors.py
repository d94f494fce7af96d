"""Errors of the lab, each with what to try."""

from wire.errors import TwineError


class LabError(TwineError):
    """The lab cannot do what was asked; a bug is anything else."""

    code = "lab"
