"""One command at a time changes a lab."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import IO, Concatenate, ParamSpec, Protocol, TypeVar

from vm_lab.errors import LabError
from vm_lab.state import LabPaths

P = ParamSpec("P")
T = TypeVar("T")


class HasPaths(Protocol):
    """Part of a lab that knows the files of the lab."""

    paths: LabPaths


S = TypeVar("S", bound=HasPaths)
Method = Callable[Concatenate[S, P], T]


def exclusive(method: Method[S, P, T]) -> Method[S, P, T]:
    """Make a method raise `LabError` while another process runs such a method for the same lab."""

    @wraps(method)
    def wrapper(lab: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with lab_lock(lab.paths, method.__name__.replace("_", "-")):
            return method(lab, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def lab_lock(paths: LabPaths, command: str) -> Iterator[None]:
    """Hold the lock of a lab. The kernel releases it when this process ends in any way.

    Its file is outside the folders of the lab, which `down` removes, and is removed at the end.
    """
    with _locked(paths, command):
        try:
            yield
        finally:
            paths.lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                paths.run_root.rmdir()  # only if no other lab is there


def _locked(paths: LabPaths, command: str) -> IO[str]:
    """Return the file of the lock, locked. The file is opened again if it was removed meanwhile."""
    while True:
        paths.run_root.mkdir(parents=True, exist_ok=True)
        try:
            file = paths.lock.open("a+")
        except FileNotFoundError:  # another command removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_current(file, paths):
                file.close()
                continue
            file.truncate(0)
            file.write(f"{os.getpid()} {command}")
            file.flush()
        except BaseException as e:
            with file:
                if isinstance(e, BlockingIOError):
                    raise _in_use_error(paths, file) from e
                raise
        return file


def _is_current(file: IO[str], paths: LabPaths) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), paths.lock.stat())
    except FileNotFoundError:
        return False


def _in_use_error(paths: LabPaths, file: IO[str]) -> LabError:
    file.seek(0)
    pid, _, command = file.read().partition(" ")
    holder = f"`twine-lab {command}` in process {pid}" if pid else "another command"
    return LabError(
        f"{holder} is changing lab {paths.name!r}; nothing was changed",
        hint="wait until it ends, or give another --name",
    )
