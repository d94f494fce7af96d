"""Resolves the user of an image to numbers and names, with the image's own lists.

Pure. Sources: the image specification 1.1 (`config.md`, "User"), passwd(5), group(5). Other rules
follow other container engines: digits are a number, the first matching line counts, and a number
without a line has group 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent.api import ImageUser
from wire.errors import Unprocessable

LISTS = ("etc/passwd", "etc/group")
"""Files of an image with its users and groups."""
LIST_MAX_BYTES = 1 << 20
NUMBER_MAX = (1 << 31) - 1
"""Highest id of users and groups, as in other engines: some programs read higher ids as negative.
"""
PATH_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,254}\$?")


@dataclass(frozen=True, slots=True)
class ListedUsers:
    """A list of users or groups in an image."""

    place: str = ""
    """Path of the file in the image, with links resolved; empty: there is none."""
    data: bytes = b""

    def lines(self) -> Iterator[list[str]]:
        """Yield the fields of each valid line."""
        for line in self.data.decode(errors="replace").split("\n"):
            fields = line.strip().split(":")
            if len(fields) >= 4 and fields[0] and _number(fields[2]) is not None:
                yield fields


def names_user(user: str) -> bool:
    """Return whether the user of an image is not root."""
    return user.partition(":")[0] not in ("", "0", "root")


def resolve(user: str, users: ListedUsers, groups: ListedUsers) -> ImageUser | None:
    """Return the user of `USER[:GROUP]`, by names or numbers; None for root.

    Raises `Unprocessable` for a name that the image does not list, and for a bad number.
    """
    who, _, group = user.partition(":")
    if not names_user(user):
        return None
    line = _line(who, users)
    uid = int(line[2]) if line else _in_range(who, "user", users)
    if not uid:
        return None
    gid = _group(group, groups) if group else (line and _number(line[3])) or 0
    name = _name(line)
    group_name = _name(_first(groups, lambda fields: _number(fields[2]) == gid))
    return ImageUser(
        uid=uid,
        gid=gid,
        name=name,
        home=_path(line, 5) or "/" if name else "",
        shell=_path(line, 6) if name else "",
        users=users.place if name else "",
        group=group_name,
        groups=groups.place if group_name else "",
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
    """Return the first line with a name or number."""
    number = _number(word)
    if number is None:
        return _first(listed, lambda fields: fields[0] == word)
    return _first(listed, lambda fields: _number(fields[2]) == number)


def _first(listed: ListedUsers, fits: Callable[[list[str]], bool]) -> list[str] | None:
    return next((fields for fields in listed.lines() if fits(fields)), None)


def _name(line: list[str] | None) -> str:
    """Return the name in a line; empty if it is missing or not plain."""
    return line[0] if line and _NAME.fullmatch(line[0]) else ""


def _in_range(word: str, what: str, listed: ListedUsers) -> int:
    """Return a number that has no line, or raise `Unprocessable`."""
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
        f"the image runs as {what} {word[:80]!r}, and {of} has no such {what}",
        hint=f"build it with the {what} added ({what}add), or use a number (USER 1000)",
    )


def _number(word: str) -> int | None:
    if not (word.isascii() and word.isdigit()) or len(word) > 10:
        return None
    return number if (number := int(word)) <= NUMBER_MAX else None


def _path(line: list[str] | None, field: int) -> str:
    """Return the path in a field of a line; empty if it is missing or not plain."""
    path = line[field] if line and len(line) > field else ""
    return path if path.startswith("/") and is_plain(path) else ""


def is_plain(path: str) -> bool:
    """Return whether a path is short and printable, so that it can be passed on."""
    return len(path) <= PATH_MAX and path.isprintable() and "\ufffd" not in path
