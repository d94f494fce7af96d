"""What a command runs with: the global options, and the host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from agent.machine import Completed, Processes, boottime_s
from agent.machine.hardware import read_hardware
from agent.machine.kernelfs import KernelFs
from agent.machine.process import HostProcesses
from sidekick.disk import Disk
from sidekick.facts import read_facts
from sidekick.profile import PROFILES, Library, Profile
from sidekick.setting import Host, Log
from sidekick.settings import SETTINGS
from sidekick.state import StateFolder
from wire.errors import Forbidden, ProgramError

AGENT_PROFILES = "profiles"
"""Folder within the state, searched last: profiles that the agent received and stores there."""


class NoProcesses:
    """Runs no program: a run on a tree below `--root` must not change this host."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,  # noqa: ARG002
        check: bool = True,  # noqa: ARG002
    ) -> Completed:
        """Refuse."""
        raise ProgramError(f"cannot run {' '.join(argv)}: programs run only with --root /")

    def lines(self, argv: Sequence[str]) -> NoReturn:
        """Refuse."""
        raise ProgramError(f"cannot run {' '.join(argv)}: programs run only with --root /")


class Context(msgspec.Struct):
    """The global options, and access to the host."""

    root: Path
    state: StateFolder
    profiles: Library
    make_host: Callable[[Path], Host]
    verbose: bool = False
    code: int = 0
    """What the command exits with."""

    def host(self) -> Host:
        """Return the host; reads its hardware."""
        host = self.make_host(self.root)
        return replace(host, log=_make_log()) if self.verbose else host

    @contextlib.contextmanager
    def locked(self, wait_s: float) -> Iterator[Host]:
        """Return the host with its lock held, for a command that may change it.

        Raises `Forbidden` unless this process may, and `Busy` if it is still locked after `wait_s`.
        """
        self.require_root()
        host = self.host()
        with self.state.lock(wait_s, host.monotonic, host.sleep):
            yield host

    def require_root(self) -> None:
        """Raise `Forbidden` unless this process may change the host."""
        if self.root == Path("/") and os.geteuid() != 0:
            raise Forbidden("sidekick changes the host's kernel", hint="run as root")

    def profile(self, name: str, host: Host) -> Profile:
        """Return a profile, rendered for the host."""
        return self.profiles.load(name, read_facts(host.fs, host.hardware))


def real_host(root: Path) -> Host:
    """Return this host, or a fake one whose files are below `root`."""
    fs = KernelFs(root)
    processes: Processes = HostProcesses() if root == Path("/") else NoProcesses()
    return Host(
        fs=fs,
        processes=processes,
        disk=Disk(),
        hardware=read_hardware(fs),
        now=time.time,
        monotonic=boottime_s,
        sleep=time.sleep,
    )


def _make_log() -> Log:
    """Return the log of this process, as all programs of ours keep it."""
    import logging  # both for --verbose alone

    from wire import log

    log.configure("sidekick")
    return logging.getLogger("sidekick")


def make_context(
    make_host: Callable[[Path], Host],
    root: Path,
    state: Path,
    profiles: tuple[Path, ...],
    verbose: bool,
) -> Context:
    """Return the context of a command with these global options."""
    library = Library(profiles or (*PROFILES, state / AGENT_PROFILES), SETTINGS)
    return Context(root, StateFolder(state), library, make_host, verbose)
