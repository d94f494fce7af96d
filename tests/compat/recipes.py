"""The images of the compatibility suite: `recipes.toml`, read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

TABLE = Path(__file__).with_name("recipes.toml")
FIXED = ("nginx", "redis", "postgres", "php-fpm", "node", "gunicorn", "memcached", "busybox")
"""The images that every run of the suites includes. `make compat` includes all."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One image: its contents, its configuration, and the checks that show that it works."""

    name: str
    like: str
    """Which properties of the public image it reproduces, as text."""
    packages: list[str] = []
    """Debian packages."""
    pypi: list[str] = []
    """Python packages, installed into /app."""
    npm: list[str] = []
    """Node packages, installed into /app/node_modules."""
    setup: str = ""
    """Script that a shell in the image runs after the packages are installed."""
    files: dict[str, str] = {}
    """Path → content. A file that begins with `#!` is executable."""
    scratch: bool = False
    """The image contains only what the set-up put below /out, without the base."""
    entrypoint: list[str] = []
    command: list[str] = []
    user: str = ""
    env: list[str] = []
    workdir: str = ""
    stop_signal: str = ""
    memory: str = "128MiB"
    data: str = ""
    """Folder that the image's documentation declares as a volume."""
    port: int = 0
    send: str = ""
    """Data to send to the port. The answer must contain `expect`."""
    ask: str = ""
    """Alternative to `send`: a command that the image's shell runs in the task and that prints
    `expect`."""
    expect: str
    logs: str
    """Text that the task's log contains once it has served."""
    write: str = ""
    """A command in the task that writes to its data. `read` is a command that then prints
    `kept`."""
    read: str = ""
    kept: str = ""
    keys: str = ""
    """Keys that the task file needs beyond the defaults, as TOML."""
    why: str = ""
    """The reason for these keys, and the error or page that gives it."""


def recipes() -> list[Recipe]:
    """Return the whole table."""
    found = msgspec.convert(tomllib.loads(TABLE.read_text())["image"], list[Recipe])
    assert len({r.name for r in found}) == len(found), "names are used once"
    assert set(FIXED) <= {r.name for r in found}
    return found
