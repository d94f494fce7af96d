"""The images of the compatibility suite: `recipes.toml`, read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("recipes.toml")
FIXED = ("nginx", "redis", "postgres", "php-fpm", "node", "gunicorn", "memcached", "busybox")
"""Those that every run of the suites has; `make compat` has all."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image: what is in it, how it says it is run, and what shows that it works."""

    name: str
    like: str
    """What of a public image it has, in words."""
    packages: list[str] = []
    """Of Debian."""
    pypi: list[str] = []
    """Python packages, into /app."""
    npm: list[str] = []
    """Node packages, into /app/node_modules."""
    setup: str = ""
    """Run by a shell in the image once the packages are there."""
    files: dict[str, str] = {}
    """Path → content; executable where it begins with `#!`."""
    scratch: bool = False
    """The image is what the set-up put below /out, without the base."""
    entrypoint: list[str] = []
    command: list[str] = []
    user: str = ""
    env: list[str] = []
    workdir: str = ""
    stop_signal: str = ""
    memory: str = "128MiB"
    data: str = ""
    """Folder that the image's documentation says is to be a volume."""
    port: int = 0
    send: str = ""
    """Sent to the port; what comes back contains `expect`."""
    ask: str = ""
    """Instead: a command for the image's shell, run inside, which prints `expect`."""
    expect: str
    logs: str
    """In the task's log once it served."""
    write: str = ""
    """A command inside that leaves something in the data, and `read` one that prints `kept`."""
    read: str = ""
    kept: str = ""
    keys: str = ""
    """What a task file must say beyond the defaults, as TOML."""
    why: str = ""
    """Why, and which error or page says so."""


def recipes() -> list[Recipe]:
    """Return the whole table."""
    found = msgspec.convert(tomllib.loads(TABLE.read_text())["image"], list[Recipe])
    assert len({r.name for r in found}) == len(found), "names are used once"
    assert set(FIXED) <= {r.name for r in found}
    return found
