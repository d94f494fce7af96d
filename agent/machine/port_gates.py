"""BPF programs that restrict which ports the processes of a cgroup may bind (ADR 0112).

A gate is for one set of ports. It has four programs of a few instructions, pinned in a folder of
its own below `/sys/fs/bpf/twine-ports`. systemd attaches two of them when it starts a unit
(`BPFProgram=`, systemd.resource-control(5)), and releases them at `daemon-reload`. We attach the
other two to the cgroup, and they stay as long as the cgroup.

`user_port` of bpf_sock_addr is at offset 24, in network order. Port 0 requests any free port, which
takes no port from another task. Types are those of Linux, include/uapi/linux/bpf.h:
BPF_PROG_TYPE_CGROUP_SOCK_ADDR 18, BPF_CGROUP_INET4_BIND 8, BPF_CGROUP_INET6_BIND 9.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
from collections.abc import Collection, Iterable
from pathlib import Path

from agent.machine import bpf
from agent.machine.bpf import BpfCommand
from agent.machine.descriptors import closing, opened_folder
from agent.netplan import BIND_HOOKS, GATES, gate_of
from wire.errors import HostError

_PROGRAM = 18
_ATTACH_TYPE = {"bind4": 8, "bind6": 9}
_BY_SYSTEMD, _BY_US = "", "-held"
_WHOLE = frozenset(f"{kind}{half}" for kind in BIND_HOOKS for half in (_BY_SYSTEMD, _BY_US))
_USER_PORT = 24
_ALLOW_MULTI = 2
"""Other programs may be attached, too (BPF_F_ALLOW_MULTI): all of them must allow a bind."""
_MOST = 64
"""Most programs of one cgroup (the kernel's limit, BPF_CGROUP_MAX_PROGS)."""


def program(ports: Collection[int]) -> bytes:
    """Return the instructions of a program: 1 for one of the ports and for 0, else 0 (EPERM)."""
    known = [0, *ports]
    lines = [_line(0x61, to=2, of=1, at=_USER_PORT), _line(0xB7, to=0, value=1)]
    for n, port in enumerate(known):  # if equal, jump to the end
        lines.append(_line(0x15, to=2, at=len(known) - n, value=socket.htons(port)))
    return b"".join([*lines, _line(0xB7, to=0, value=0), _line(0x95)])


def _line(code: int, *, to: int = 0, of: int = 0, at: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", code, of << 4 | to, at, value)


def is_complete(name: str, folder: Path = Path(GATES)) -> bool:
    """Return whether a gate exists with all its programs."""
    try:
        return set(os.listdir(folder / name)) >= _WHOLE
    except FileNotFoundError:
        return False


def gates(folder: Path = Path(GATES)) -> set[str]:
    """Return the names of all gates that have all their programs."""
    try:
        return {name for name in os.listdir(folder) if is_complete(name, folder)}
    except FileNotFoundError:
        return set()


def make_gates(
    wanted: Iterable[Collection[int]], *, alone: bool, folder: Path = Path(GATES)
) -> None:
    """Make a gate for each set of ports; with `alone` remove all others.

    Raises `HostError`.
    """
    sets = {gate_of(ports): ports for ports in wanted}
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in sets.keys() - gates(folder):
            _make(folder / name, sets[name])
        for path in folder.iterdir() if alone else ():
            if path.name not in sets:
                shutil.rmtree(path)
    except OSError as e:
        raise HostError(
            f"cannot store the port programs in {folder}: {e.strerror}",
            hint="is bpffs mounted at /sys/fs/bpf? may twine-network.service call bpf(2)?",
        ) from e


def _make(path: Path, ports: Collection[int]) -> None:
    path.mkdir(exist_ok=True)
    for kind in BIND_HOOKS:
        for half in (_BY_SYSTEMD, _BY_US):
            if (path / f"{kind}{half}").exists():
                continue
            with closing(_loaded(kind, ports)) as fd:
                bpf.pin(fd, str(path / f"{kind}{half}"))


def _loaded(kind: str, ports: Collection[int]) -> int:
    text = program(ports)
    code, license_ = (
        ctypes.create_string_buffer(text, len(text)),
        ctypes.create_string_buffer(b"GPL"),
    )
    verifier_log = (0, 0, 0)  # none
    attributes = struct.pack(
        "=IIQQIIQII16sII",
        _PROGRAM,
        len(text) // 8,
        ctypes.addressof(code),
        ctypes.addressof(license_),
        *verifier_log,
        0,
        0,
        b"twine_ports",
        0,
        _ATTACH_TYPE[kind],
    )
    return bpf.call(BpfCommand.PROG_LOAD, attributes, code, license_)[0]


def attach(cgroup: Path, ports: Collection[int], folder: Path = Path(GATES)) -> bool:
    """Attach an existing gate to a cgroup; return False if the cgroup is missing.

    Idempotent. The gate stays as long as the cgroup. Raises `HostError`.
    """
    try:
        opened = opened_folder(cgroup)
    except FileNotFoundError:
        return False
    try:
        with opened as fd:
            for kind in BIND_HOOKS:
                _attach(fd, kind, folder / gate_of(ports) / f"{kind}{_BY_US}")
    except OSError as e:
        raise HostError(f"cannot restrict {cgroup} to its ports: {e.strerror}") from e
    return True


def _attach(cgroup: int, kind: str, pinned: Path) -> None:
    with closing(bpf.open_pinned(str(pinned))) as fd:
        (own,) = struct.unpack_from("=4xI", bpf.object_info(fd, 8))  # type, id
        if own not in attached(cgroup, kind):
            attributes = struct.pack("=4I", cgroup, fd, _ATTACH_TYPE[kind], _ALLOW_MULTI)
            bpf.call(BpfCommand.PROG_ATTACH, attributes)


def attached(cgroup: int, kind: str) -> list[int]:
    """Return the ids of the programs at a cgroup, given its descriptor. Raises `OSError`."""
    numbers = (ctypes.c_uint32 * _MOST)()
    asked = struct.pack(
        "=4IQII", cgroup, _ATTACH_TYPE[kind], 0, 0, ctypes.addressof(numbers), _MOST, 0
    )
    _, answer = bpf.call(BpfCommand.PROG_QUERY, asked, numbers)
    return list(numbers)[: struct.unpack_from("=24xI", answer)[0]]
