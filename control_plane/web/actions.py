"""What can be done from a page: each is a route that twinectl calls, too, with its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.api.capacity import DecisionNote
from wire.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class FormAction:
    """A form: the route that it calls, and how its fields become the body."""

    route: str
    body: Callable[[Mapping[str, str]], Any] | None = None


def _note(form: Mapping[str, str]) -> DecisionNote:
    if not form.get("reason"):
        raise InvalidInput("a reason is missing", hint="say in the form why")
    return DecisionNote(note=form["reason"])


ACTIONS: tuple[FormAction, ...] = (
    FormAction("pause_job"),
    FormAction("resume_job"),
    FormAction("rollback_job"),
    FormAction("approve_request", _note),
    FormAction("deny_request", _note),
)
