"""The forms of the console: which route each calls, and how its fields become the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from control_plane.api.capacity import DecisionNote
from control_plane.api.health import ConfirmDown
from control_plane.api.intent_changes import HoldChange
from control_plane.api.inventory import Drain, Undrain
from control_plane.api.operations import RestartRequest
from control_plane.api.rebalancing import PauseRequest
from wire.errors import InvalidInput

FORM_MAX = 64 << 10
Fields = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FormAction:
    """A form: the route that it calls, and how its fields become the body."""

    route: str
    words: str
    """Its effect, for display."""
    body: Callable[[Fields], Any] | None = None


def _reason(form: Fields) -> str:
    if not (reason := form.get("reason", "").strip()):
        raise InvalidInput("a reason is missing", hint="enter a reason in the form")
    return reason


def _convert(kind: Any, **fields: Any) -> Any:
    """Return a body with the bounds that the route's own decoder would check."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as e:
        raise InvalidInput(f"the form is invalid: {e}") from e


def _note(form: Fields) -> DecisionNote:
    note: DecisionNote = _convert(DecisionNote, note=_reason(form))
    return note


def _machine_body(kind: Any, form: Fields) -> Any:
    return _convert(kind, machines=[form.get("machine", "")], reason=_reason(form))


def _hold(form: Fields) -> Any:
    minutes = form.get("minutes", "")
    is_number = minutes.isascii() and minutes.isdecimal() and len(minutes) < 6
    if not is_number or not int(minutes):
        raise InvalidInput(f"minutes is a number from 1 to 99999, not {minutes[:20]!r}")
    return _convert(HoldChange, lasts_s=60.0 * int(minutes), reason=_reason(form))


ACTIONS: tuple[FormAction, ...] = (
    FormAction("pause_job", "pause a job"),
    FormAction("resume_job", "resume a job"),
    FormAction("rollback_job", "roll back a job"),
    FormAction("put_hold", "hold a job", _hold),
    FormAction(
        "restart_task",
        "restart a task",
        lambda form: _convert(RestartRequest, reason=_reason(form)),
    ),
    FormAction("approve_request", "approve a request", _note),
    FormAction("deny_request", "deny a request", _note),
    FormAction("drain_machines", "drain a machine", partial(_machine_body, Drain)),
    FormAction(
        "undrain_machines",
        "undrain a machine",
        lambda form: _convert(Undrain, machines=[form.get("machine", "")]),
    ),
    FormAction("confirm_down", "confirm a machine down", partial(_machine_body, ConfirmDown)),
    FormAction(
        "pause_rebalance",
        "pause the ReBalancer",
        lambda form: _convert(PauseRequest, reason=_reason(form)),
    ),
    FormAction("resume_rebalance", "resume the ReBalancer"),
    FormAction("end_session", "end a session"),
)


async def fields_of(request: web.Request) -> dict[str, str]:
    """Return the fields of a form, or raise `InvalidInput`."""
    if request.content_type != "application/x-www-form-urlencoded":
        raise InvalidInput("a form is application/x-www-form-urlencoded")
    if (request.content_length or 0) > FORM_MAX:
        raise InvalidInput(f"a form has at most {FORM_MAX} bytes")
    try:
        fields = await request.post()
    except ValueError as e:
        raise InvalidInput(f"the form is not UTF-8 text: {e}") from e
    return {name: value for name, value in fields.items() if isinstance(value, str)}
