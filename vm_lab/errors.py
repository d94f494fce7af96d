"""Errors of the lab, each with a hint."""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from wire.errors import TwineError

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
FREE_SPACE = "free space there and repeat the command; `twine-lab down` removes a lab"


class LabError(TwineError):
    """The lab cannot carry out a request. Any other exception is a bug."""

    code = "lab"


@contextlib.contextmanager
def reporting(program: str, places: tuple[Path, ...] = ()) -> Iterator[None]:
    """Print an error with its hint, and end the process; a full disk is an error, too.

    `places` are the folders that the program writes to, in addition to that of temporary files.
    """
    try:
        yield
    except (TwineError, OSError) as e:
        error = e if isinstance(e, TwineError) else disk_error(e, places)
        if error is None:
            raise
        click.echo(f"{program}: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)


def disk_error(error: OSError, places: tuple[Path, ...] = ()) -> LabError | None:
    """Return the error of a disk that cannot be written; None for any other error."""
    reason = why_unwritable(str(error))
    if not reason:
        return None
    where = f": {error.filename}" if error.filename else ""
    free = [f"{_free_mib(place)} MiB at {place}" for place in (*places, _temporary())]
    return LabError(
        f"cannot write a file{where}: {reason} (free: {', '.join(free)})",
        hint=FREE_SPACE,
    )


def why_unwritable(text: str) -> str:
    """Return the reason in a text why a disk cannot be written, "" if it has none."""
    return next((reason for reason in map(os.strerror, UNWRITABLE) if reason in text), "")


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # no folder can be written
        return Path("/tmp")


def _free_mib(place: Path) -> int:
    """Return the free space of the file system of a folder, or of its first parent that exists."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free >> 20
