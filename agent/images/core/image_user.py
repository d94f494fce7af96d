"""The user that an image wants to be run as: its numbers and its name, from the image's own lists.

Pure. Sources: the image specification 1.1 (`config.md`, "User"), passwd(5), group(5). What is not
said there is as other engines have it: a word of digits is a number, the first line that fits
counts, and a number without a line has group 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.api import ImageUser
from wire.errors import Unprocessable

LISTS = ("etc/passwd", "etc/group")
"""Where an image has its users and its groups."""
LIST_MAX_BYTES = 1 << 20
NUMBER_MAX = (1 << 31) - 1
"""Highest id of users and groups, as in other engines; some programs read higher ones as negative.
"""
PATH_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,254}\$?")


@dataclass(frozen=True, slots=True)
class ListedUsers:
    """A list of the image's."""

    place: str = ""
    """Where it really is, below the image's top and without links; empty: there is none."""
    data: bytes = b""

    def lines(self) -> Iterator[list[str]]:
        """Yield the fields of each line that a list can have."""
        for line in self.data.decode(errors="replace").split("\n"):
            fields = line.strip().split(":")
            if len(fields) >= 4 and fields[0] and _number(fields[2]) is not None:
                yield fields


def asks(user: str) -> bool:
    """Return whether an image names a user other than root; then its lists are read."""
    return user.partition(":")[0] not in ("", "0", "root")


def resolve(user: str, users: ListedUsers, groups: ListedUsers) -> ImageUser | None:
    """Return the user of `USER[:GROUP]`, by names or numbers; None for root.

    Raises `Unprocessable` for a name that the image does not list, and for a bad number.
    """
    who, _, group = user.partition(":")
    if not asks(user):
        return None
    line = _line(who, users)
    uid = int(line[2]) if line else _in_range(who, "user", users)
    if not uid:
        return None
    gid = _group(group, groups) if group else (line and _number(line[3])) or 0
    named = line is not None and _NAME.fullmatch(line[0]) is not None
    of_group = _first(groups, lambda fields: _number(fields[2]) == gid)
    has_name = of_group is not None and _NAME.fullmatch(of_group[0]) is not None
    return ImageUser(
        uid=uid,
        gid=gid,
        name=line[0] if line and named else "",
        home=_path(line, 5) or "/" if named else "",
        shell=_path(line, 6) if named else "",
        users=users.place if named else "",
        group=of_group[0] if of_group and has_name else "",
        groups=groups.place if has_name else "",
    )


def login(user: ImageUser | None) -> dict[str, str]:
    """Return `HOME`, `USER` and `LOGNAME` of a user; empty for one without a name."""
    if user is None or not user.name:
        return {}
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}


def _group(group: str, groups: ListedUsers) -> int:
    line = _line(group, groups)
    return int(line[2]) if line else _in_range(group, "group", groups)


def _line(word: str, listed: ListedUsers) -> list[str] | None:
    """Return the first line of a name, or of a number."""
    number = _number(word)
    if number is None:
        return _first(listed, lambda fields: fields[0] == word)
    return _first(listed, lambda fields: _number(fields[2]) == number)


def _first(listed: ListedUsers, fits: Callable[[list[str]], bool]) -> list[str] | None:
    return next((fields for fields in listed.lines() if fits(fields)), None)


def _in_range(word: str, what: str, listed: ListedUsers) -> int:
    """Return a number that no line is about."""
    number = _number(word)
    if number is not None:
        return number
    of = f"its /{LISTS[what == 'group']}" + ("" if listed.place else ", which it does not have,")
    if word.isascii() and word.isdigit():
        raise Unprocessable(
            f"the image runs as {what} {word[:20]}: the highest number is {NUMBER_MAX}",
            hint="build it with a lower number",
        )
    raise Unprocessable(
        f"the image runs as {what} {word[:80]!r}, and {of} names no such {what}",
        hint=f"build it with the {what} added ({what}add), or name a number (USER 1000)",
    )


def _number(word: str) -> int | None:
    if not (word.isascii() and word.isdigit()) or len(word) > 10:
        return None
    return number if (number := int(word)) <= NUMBER_MAX else None


def _path(line: list[str] | None, field: int) -> str:
    """Return a path of a line, empty where there is none that could be passed on."""
    path = line[field] if line and len(line) > field else ""
    return path if path.startswith("/") and is_plain(path) else ""


def is_plain(path: str) -> bool:
    """Return whether a path can be written down and passed on letter by letter."""
    return len(path) <= PATH_MAX and path.isprintable() and "\ufffd" not in path
