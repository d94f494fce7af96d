"""Every failure that Twine raises on purpose; anything else is a bug.

TwineError
├── InvalidInput      the request is wrong: which field, why            400
├── Forbidden         the caller may not do this                        403
├── NotFound          no such task, image, job, …                       404
├── Conflict          stale generation or epoch, or still in use        409
│   └── OlderStore    of a control plane whose store was restored       409
├── TooSlow           the request did not come in time                  408
├── TooLarge          over a limit of size                              413
├── Unprocessable     well-formed, but cannot be carried out            422
│   └── QuotaExceeded beyond what an entitlement may use                422
├── UnknownOutcome    the store does not say whether a write was made   503
├── Busy              the object is in use or the server full; try again 503
├── Unreachable       the other side does not answer                    503
│   └── Refused       its host does, but nothing listens there          503
├── HostError         the host refused: kernel, systemd, btrfs, programs
│   ├── KernelFileError
│   ├── SystemdError
│   ├── BtrfsError
│   ├── StepFailed
│   └── ProgramError
├── ConfigError       our own configuration cannot be used              500
└── ProtocolError     the other side's answer violates its contract     502

A message names what was attempted, on which object, with which value, and why it failed;
`hint` says what to try. `code` is stable and part of the wire API; `status` is the HTTP
status (RFC 9110); `exit_code` is that of the command line tools (docs/operating.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it crosses the wire (RFC 9457, `application/problem+json`)."""

    code: str
    """Stable name of the kind of error, also the last part of the RFC's `type`."""
    status: int
    detail: str
    """What was attempted, on which object, with which value, and why it failed."""
    hint: str = ""
    retryable: bool = False
    errors: tuple[FieldError, ...] = ()
    """Every violation of a request at once, not only the first."""
    request_id: str = ""
    """Identifies the request in the server's log and in the audit log."""


class FieldError(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a document written by a person."""

    field: str
    """Where: a dotted path such as `task.limits.memory_max_bytes`."""
    reason: str


class TwineError(Exception):
    """Base of every failure raised on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, hint: str = "", errors: tuple[FieldError, ...] = ()) -> None:
        """`what` is the whole message, `hint` what to try; `errors` lists violations by field."""
        super().__init__(what)
        self.hint = hint
        self.errors = errors
        self.request_id = ""
        """Id of the request that the other side refused; empty where it was refused here."""

    def problem(self) -> Problem:
        """Return the error in its wire form."""
        return Problem(
            code=self.code,
            status=self.status,
            detail=str(self),
            hint=self.hint,
            retryable=self.retryable,
            errors=self.errors,
        )


class InvalidInput(TwineError):
    """The request itself is wrong and will stay wrong."""

    code = "invalid_input"
    status = 400
    exit_code = 64


class Unauthenticated(TwineError):
    """The caller proved no identity."""

    code = "unauthenticated"
    status = 401
    exit_code = 77


class Forbidden(TwineError):
    """The caller is known and may not do this."""

    code = "forbidden"
    status = 403
    exit_code = 77


class NotFound(TwineError):
    """There is no such object."""

    code = "not_found"
    status = 404
    exit_code = 3


class Conflict(TwineError):
    """The request is older than the state in force, or the object is in use."""

    code = "conflict"
    status = 409
    exit_code = 5


class OlderStore(Conflict):
    """The calling control plane's store is older than one that called this host before."""

    code = "older_store"


class TooSlow(TwineError):
    """The request was not complete in time."""

    code = "too_slow"
    status = 408
    retryable = True
    exit_code = 75


class TooLarge(TwineError):
    """The request is over a limit of size."""

    code = "too_large"
    status = 413
    exit_code = 64


class Unprocessable(TwineError):
    """The request is well-formed and cannot be carried out."""

    code = "unprocessable"
    status = 422
    exit_code = 5


class QuotaExceeded(Unprocessable):
    """An entitlement may use less than is requested."""

    code = "quota_exceeded"


class UnknownOutcome(TwineError):
    """A write was made, was not, or will be: `store.outcomes` finds out which."""

    code = "unknown_outcome"
    status = 503
    retryable = True
    exit_code = 75


class Busy(TwineError):
    """Another request or program uses the object; the same request may succeed later."""

    code = "busy"
    status = 503
    retryable = True
    exit_code = 75


class Unreachable(TwineError):
    """The other side does not answer."""

    code = "unreachable"
    status = 503
    retryable = True
    exit_code = 69


class Refused(Unreachable):
    """The other side's host answers, but no program listens there."""

    code = "refused"


class HostError(TwineError):
    """The host refused an operation: its kernel, systemd, file system or a program."""

    code = "host_error"
    status = 503
    retryable = True


class KernelFileError(HostError):
    """A file of the kernel (/proc, /sys) could not be read or written."""

    code = "kernel_file_error"


class SystemdError(HostError):
    """Systemd refused a request, or the bus to it is gone."""

    code = "systemd_error"


class StepFailed(HostError):
    """An init step of a task failed."""

    code = "step_failed"


class BtrfsError(HostError):
    """A subvolume could not be made, changed or removed."""

    code = "btrfs_error"


class NotBtrfs(BtrfsError):
    """A folder is not on btrfs, so subvolumes and quotas do not work there."""

    code = "not_btrfs"


class ProgramError(HostError):
    """A program could not be started, failed or took too long."""

    code = "program_error"


class ConfigError(TwineError):
    """Our own configuration cannot be used."""

    code = "config_error"
    exit_code = 78


class ProtocolError(TwineError):
    """The other side's answer violates its contract."""

    code = "protocol_error"
    status = 502


def _tree(root: type[TwineError]) -> dict[str, type[TwineError]]:
    classes = {root.code: root}
    for kind in root.__subclasses__():
        classes |= _tree(kind)
    return classes


def from_problem(problem: Problem) -> TwineError:
    """Return the error that the other side raised, as the same class here."""
    kind = _tree(TwineError).get(problem.code, ProtocolError)
    error = kind(problem.detail, hint=problem.hint, errors=problem.errors)
    error.request_id = problem.request_id
    return error


def some_of(names: Sequence[object], most: int = 5) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
