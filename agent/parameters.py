"""Reads and checks parameters in the path and query of a request to the agent.

Each function raises `InvalidInput` for a malformed value.
"""

from __future__ import annotations

import re

from agent import api
from agent.api.volumes import VOLUME_PATTERN
from agent.host.callers import check_local_version
from wire.errors import InvalidInput
from wire.server import Call

_ID = re.compile(api.ID_PATTERN)
_VOLUME = re.compile(VOLUME_PATTERN)
_DIGEST = re.compile(api.DIGEST_PATTERN)


def task_id_of(call: Call) -> str:
    """Return the id of the task that a request is about."""
    return _word(call, "task_id", "a task ID")


def label_of(call: Call) -> str:
    """Return the label of the snapshot that a request is about."""
    return _word(call, "label", "a name of label")


def credential_of(call: Call) -> tuple[str, str]:
    """Return entitlement and name of the credential that a request is about."""
    return _word(call, "entitlement", "a valid name"), _word(call, "name", "a valid name")


def volume_of(call: Call) -> tuple[str, str]:
    """Return entitlement and name of the volume that a request is about."""
    name = call.path["volume"]
    if not _VOLUME.fullmatch(name):
        hint = "TASK.VOLUME or TASK.VOLUME@LABEL"
        raise InvalidInput(f"{name[:80]!r} is not the name of a volume", hint=hint)
    return _word(call, "entitlement", "a name of entitlement"), name


def digest_of(call: Call) -> str:
    """Return the digest of the image that a request is about."""
    digest = call.path["digest"]
    if not _DIGEST.fullmatch(digest):
        raise InvalidInput(f"{digest[:80]!r} is not a digest", hint="sha256:<64 hex digits>")
    return digest


def format_of(call: Call) -> api.ImageFormat:
    """Return the format of an image that is sent."""
    text = call.query.get("format", "tar")
    try:
        return api.ImageFormat(text)
    except ValueError as e:
        raise InvalidInput(f"format {text!r} is unknown", hint="tar, btrfs or oci") from e


def version_of(call: Call, known_term: int) -> tuple[int | None, int | None]:
    """Return generation and epoch of a command about a task, None for a missing one."""
    generation, epoch = call.whole("generation"), call.whole("epoch")
    check_local_version(call.peer, "a task", generation, epoch, known_term)
    return generation, epoch


def _word(call: Call, part: str, kind: str) -> str:
    word = call.path[part]
    if not _ID.fullmatch(word):
        raise InvalidInput(
            f"{word[:80]!r} is not {kind}",
            hint="1 to 63 of a-z, 0-9 and -, with no dash at the start or end",
        )
    return word
