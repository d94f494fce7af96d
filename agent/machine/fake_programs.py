"""Behaviour of the programs that Twine starts in units, on the machine in memory."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from agent.machine import Property
from agent.machine.fake_systemd import Ended, Program
from agent.machine.layer import main as layer

_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""The Python of Debian 12 (3.11.2) has no filters yet."""


def ends_with(code: int = 0, signal: str | None = None) -> Program:
    """Return a program that ends at once in this way."""
    return lambda _argv, _properties: Ended(code=None if signal else code, signal=signal)


def tar(argv: list[str], properties: Mapping[str, Property]) -> Ended:
    """Unpack as `tar -x [-f FILE] [-C FOLDER] [--exclude=GLOB]` does, without devices.

    The file may be standard input. File and folder may lie inside a sandbox.
    """
    archive, folder = str(properties.get("StandardInputFile", "")), "/"
    excluded = []
    arguments = iter(argv[1:])
    for argument in arguments:
        if argument == "-C":
            folder = next(arguments)
        elif argument.startswith("--exclude="):
            excluded.append(argument.partition("=")[2])
        elif argument.startswith("-") and not argument.startswith("--") and argument.endswith("f"):
            name = next(arguments)
            archive = archive if name == "-" else str(_host_path(name, properties))
    return Ended(code=0 if _unpack(archive, _host_path(folder, properties), excluded) else 2)


def python(argv: list[str], properties: Mapping[str, Property]) -> Callable[[], Ended] | None:
    """Apply layers as `python -m agent.machine.layer` does; other modules run until stopped.

    Without root rights all files belong to the user that runs the tests.
    """
    if "agent.machine.layer" not in argv:
        return None
    folder, tree, *words = argv[argv.index("agent.machine.layer") + 1 :]
    paths = [str(_host_path(path, properties)) for path in (folder, tree)]
    pipes = [str(properties[f"Standard{name}File"]) for name in ("Input", "Output")]

    def run() -> Ended:
        try:
            with open(pipes[0], "rb") as requests, open(pipes[1], "wb") as reports:
                owners = os.geteuid() == 0
                return Ended(code=layer([*paths, *words], requests, reports, owners=owners))
        except OSError:  # the agent is gone, and the pipes with it
            return Ended(code=1)

    return run


def shell(argv: list[str], _properties: Mapping[str, Property]) -> Ended | None:
    """End scripts that unmount: there are no mounts. Other scripts run until stopped."""
    return Ended() if any("umount" in word for word in argv) else None


def btrfs(create: Callable[[Path], None], finish: Callable[[Path, str], None]) -> Program:
    """Return a `btrfs receive -f FILE FOLDER` whose stream is a tar archive.

    Other content leaves an unfinished subvolume, as the real program does.
    """

    def run(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        if "receive" not in argv or "-f" not in argv:
            return Ended(code=1)
        stream = _host_path(argv[argv.index("-f") + 1], properties)
        target = _host_path(argv[-1], properties) / "received"
        create(target)
        if not _unpack(str(stream), target, ()):
            return Ended(code=1)
        finish(target, hashlib.md5(stream.read_bytes(), usedforsecurity=False).hexdigest())
        return Ended()

    return run


def _unpack(archive: str, folder: Path, excluded: Iterable[str]) -> bool:
    try:
        with tarfile.open(archive) as file:
            members = [
                member
                for member in file.getmembers()
                if not any(fnmatch.fnmatch(member.name, glob) for glob in excluded)
            ]
            if any(member.isdev() or _leads_out(member) for member in members):
                return False
            file.extractall(folder, members, **_FILTER)
    except (tarfile.TarError, OSError, EOFError):
        return False
    return True


def _leads_out(member: tarfile.TarInfo) -> bool:
    """Return whether a member would be written outside of the folder that it is unpacked into."""
    return os.path.isabs(member.name) or ".." in member.name.split("/")


def _host_path(path: str, properties: Mapping[str, Property]) -> Path:
    """Return the host's path of a path inside a unit's sandbox."""
    for name in ("BindPaths", "BindReadOnlyPaths"):
        mounts = properties.get(name, ())
        assert isinstance(mounts, Iterable)
        for mount in mounts:
            source, _, target = str(mount).removeprefix("-").partition(":")
            if PurePosixPath(path).is_relative_to(target or source):
                return Path(source) / PurePosixPath(path).relative_to(target or source)
    root = properties.get("RootDirectory")
    return Path(str(root)) / path.lstrip("/") if root else Path(path)


PROGRAMS: Mapping[str, Program] = {
    "chmod": ends_with(0),
    "false": ends_with(1),
    "find": ends_with(0),
    "python": python,
    "python3": python,
    "sh": shell,
    "skopeo": ends_with(1),
    "tar": tar,
    "true": ends_with(0),
}
"""Default behaviour of programs; others run until they are stopped. No registry is reachable
unless a test provides one."""
