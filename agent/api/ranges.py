"""Ranges of fields in the agent's API, and the base classes of its types.

Each subject has its own module in this package; `agent.api` exports them all.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

END = r"$(?!\n)"
"""End of the text in regular expressions of ECMA (the OpenAPI document) and of Python. In Python
`$` alone also matches before a final newline."""
ID_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?" + END
"""Ids become part of unit names and paths, so they are limited to a DNS label (RFC 1123)."""
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}" + END

Name = Annotated[
    str,
    Meta(
        pattern=ID_PATTERN,
        description="1 to 63 of a-z, 0-9 and -, with no dash at the start or end",
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
"""The kernel accepts no longer argument (MAX_ARG_STRLEN, 32 pages), and none with a NUL."""
EnvName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*" + END,
        max_length=256,
        description="letters, digits and _; it cannot start with a digit",
    ),
]
HttpPath = Annotated[
    str,
    Meta(
        pattern=r"^/[\x21-\x7e]*" + END,
        max_length=2048,
        description="a path that starts with /, without spaces, of at most 2048 characters",
    ),
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
StartPeriod = Annotated[float, Meta(ge=0, le=86_400)]
COUNT_MAX = 1 << 53
"""The largest integer that all JSON parsers read exactly (RFC 8259, section 6)."""
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Bytes = Count
"""At most 8 PiB."""
Few = Annotated[int, Meta(ge=0, le=1 << 16)]
"""Number of a machine's CPUs, sockets or devices."""
Moment = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970, or since a boot."""
Share = Annotated[float, Meta(ge=0, le=1)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
ID_MAX = 256
Id = Annotated[str, Meta(max_length=ID_MAX)]
"""A short text from another program: an id, a version, a name."""
Words = Annotated[str, Meta(max_length=65_536)]
"""A sentence from another program: a reason, an event."""
REASON_MAX = 4096
"""Most characters of a reason or event that the agent sends: an answer has many of them."""
Pem = Annotated[str, Meta(max_length=65_536)]
Pins = Annotated[list[Id], Meta(max_length=8)]
"""`sha256:<hex>` of authorities."""
Address = Annotated[str, Meta(max_length=300, description="HOST:PORT, of at most 300 characters")]


class Written(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of types that people write: unknown fields are refused."""


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """Base of types that programs exchange: unknown fields are ignored."""


def bounded(text: str, most: int = REASON_MAX) -> str:
    """Return a text of any origin, changed so that no reader refuses the answer that contains it.

    It is cut, and bytes of file names that are no UTF-8 are written as escapes.
    """
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 1]}…"
