"""Credentials that an agent holds for tasks: their names and sizes, never their values.

Also the configuration of a task: files in the same folder that are not secret.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import END, NO_NUL, NO_NUL_WORDS, Bytes, Id, Moment, Reported

CONFIGURATION = "configuration"
"""Capability of a host whose agent can pass a configuration to tasks."""
CONFIGURATION_MAX = 64 << 10
"""Bytes of all texts of a task together. It is small because each version of a job keeps a copy."""
FileName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}" + END,
        description="a file name: letters, digits, dots, dashes and underscores",
    ),
]
Configuration = Annotated[
    dict[
        FileName,
        Annotated[
            str,
            Meta(max_length=32 << 10, pattern=NO_NUL, description=NO_NUL_WORDS.format("32,768")),
        ],
    ],
    Meta(max_length=64),
]
"""File → its text, in UTF-8."""


class CredentialInfo(Reported, frozen=True, kw_only=True):
    """One credential without its value. The agent passes the value only to systemd."""

    entitlement: Id
    name: Id
    size_bytes: Bytes
    put_at: Moment
    """Seconds since 1970."""


class Credentials(Reported, frozen=True, kw_only=True):
    """All credentials that a host holds."""

    credentials: Annotated[list[CredentialInfo], Meta(max_length=100_000)]


def contradictions(
    configuration: Mapping[str, str], credentials: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield field and reason of each error of a configuration that its types do not exclude."""
    size = sum(len(text.encode(errors="replace")) for text in configuration.values())
    if size > CONFIGURATION_MAX:
        reason = f"its files hold {size} bytes together; the maximum is {CONFIGURATION_MAX}"
        yield "configuration", reason
    for name in sorted(configuration.keys() & {*credentials}):
        yield f"configuration.{name}", "a credential has the same name"
