"""The ranges that fields of the wire may have, and the bases of its types.

Each concept has a module in this package that builds on it; `agent.api` exports them all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

END = r"$(?!\n)"
"""End of the text in ECMA's dialect (the OpenAPI document) and in Python's alike, where `$`
alone lets one newline pass."""
ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?" + END
"""Ids become part of unit names and paths, so they are kept to a DNS label (RFC 1123)."""
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}" + END

Name = Annotated[
    str,
    Meta(
        pattern=ID_PATTERN,
        description="1 to 63 of a-z, 0-9 and -, neither first nor last a dash",
    ),
]
DigestStr = Annotated[
    str, Meta(pattern=DIGEST_PATTERN, description="sha256: and 64 hexadecimal digits")
]
Port = Annotated[int, Meta(ge=1, le=65535)]
CpuWeight = Annotated[int, Meta(ge=1, le=10_000)]
"""Range of cpu.weight (Linux, Documentation/admin-guide/cgroup-v2.rst)."""
NO_NUL = r"^[^\x00]*$"
NO_NUL_WORDS = "text without NUL characters, of at most {} characters"
Argument = Annotated[
    str,
    Meta(max_length=131_072, pattern=NO_NUL, description=NO_NUL_WORDS.format("131,072")),
]
"""The kernel takes no longer argument (MAX_ARG_STRLEN, 32 pages), and none with a NUL."""
EnvName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*" + END,
        max_length=256,
        description="letters, digits and _, the first no digit",
    ),
]
HttpPath = Annotated[
    str,
    Meta(
        pattern=r"^/[\x21-\x7e]*" + END,
        max_length=2048,
        description="a path that starts with / and has no spaces, of at most 2048 characters",
    ),
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
StartPeriod = Annotated[float, Meta(ge=0, le=86_400)]
COUNT_MAX = 1 << 53
"""Up to here every program that reads JSON has the same number (RFC 8259, section 6)."""
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Bytes = Count
"""At most 8 PiB."""
Few = Annotated[int, Meta(ge=0, le=1 << 16)]
"""Number of a machine's CPUs, sockets or devices."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970, or since a boot."""
Share = Annotated[float, Meta(ge=0, le=1)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
Id = Annotated[str, Meta(max_length=256)]
"""A word that another program made up: an id, a version, a name."""
Words = Annotated[str, Meta(max_length=65_536)]
"""A sentence of another program's: why, what happened."""
Pem = Annotated[str, Meta(max_length=65_536)]
Pins = Annotated[list[Id], Meta(max_length=8)]
"""`sha256:<hex>` of authorities."""
Address = Annotated[str, Meta(max_length=300, description="HOST:PORT, of at most 300 characters")]


class Written(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of what a person writes."""


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a program reports."""
