"""Encodes unit properties from plain Python values for systemd's D-Bus interface.

Names are those of org.freedesktop.systemd1(5): times end in `USec` and are microseconds. The table
of pystemd lacks a third of the properties of a task, and its names differ between releases. So
the whole table is here.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeGuard

from wire.errors import InvalidInput

Token = tuple[int, object]
"""A piece of a message for `bus.py`: type code and value; -1 closes a container."""

UNLIMITED = 2**64 - 1
"""The value of "infinity" in a limit."""

CLOSE: Token = (-1, None)

_BY_SIGNATURE = {
    "s": """
        CollectMode Description DevicePolicy Group KeyringMode KillMode LogNamespace
        ManagedOOMPreference NetworkNamespacePath NotifyAccess OOMPolicy ProcSubset ProtectHome
        ProtectProc ProtectSystem Restart RootDirectory Slice StandardError StandardErrorFile
        StandardInput StandardInputFile StandardOutput StandardOutputFile SyslogIdentifier TTYPath
        Type User WorkingDirectory""",
    "b": """
        Delegate DynamicUser LockPersonality MountAPIVFS NoNewPrivileges PrivateDevices PrivateIPC
        PrivateMounts PrivateNetwork PrivateTmp PrivateUsers ProtectClock ProtectControlGroups
        ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables RemainAfterExit
        RemoveIPC RestrictRealtime RestrictSUIDSGID RootDirectoryStartOnly SyslogLevelPrefix""",
    "t": """
        AmbientCapabilities CPUQuotaPerSecUSec CPUWeight CapabilityBoundingSet IOWeight LimitCORE
        LimitCORESoft LimitMEMLOCK LimitNOFILE LimitNPROC LimitSTACK LogRateLimitIntervalUSec
        MemoryHigh MemoryLow MemoryMax MemoryMin MemorySwapMax RestrictNamespaces RuntimeMaxUSec
        TasksMax TimeoutStartUSec TimeoutStopUSec""",
    "u": "LogRateLimitBurst UMask",
    "i": "KillSignal Nice OOMScoreAdjust SystemCallErrorNumber",
    "as": """
        After Before Documentation Environment ExecSearchPath InaccessiblePaths JoinsNamespaceOf
        PartOf ReadOnlyPaths ReadWritePaths Requires Requisite SystemCallArchitectures""",
    "ay": "AllowedCPUs AllowedMemoryNodes",
    "a(sasas)": "ExecCondition ExecStart ExecStartPre ExecStopPost",
    "a(say)": "SetCredential",
    "a(ss)": "BPFProgram DeviceAllow LoadCredential TemporaryFileSystem",
    "a(ssbt)": "BindPaths BindReadOnlyPaths",
    "a(st)": "IOReadBandwidthMax IOReadIOPSMax IOWriteBandwidthMax IOWriteIOPSMax",
    "a(iayu)": "IPAddressDeny",
    "(bas)": "RestrictAddressFamilies SystemCallFilter",
}
SIGNATURES = {name: kind for kind, names in _BY_SIGNATURE.items() for name in names.split()}
"""D-Bus type of each property we may set (systemd 257, src/core/dbus-*.c)."""

_CAPABILITIES = """
    CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
    NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
    SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
    SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG
    WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"""
"""In the order of their bits (include/uapi/linux/capability.h)."""
_BITS = {name: 1 << number for number, name in enumerate(_CAPABILITIES.split())}

_ESCAPED = frozenset(("a(sasas)", "a(say)"))
"""Types whose values systemd escapes in the unit's file, as it does for `Environment`. It writes
others as they are (`unit_write_setting`) and reads the file again at a `daemon-reload`. There the
text after a newline would be another property, such as a command that runs as root."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")

_ALL_NAMESPACES = 0x7E020080
"""CLONE_NEW{TIME,CGROUP,UTS,IPC,USER,PID,NET,NS} (include/uapi/linux/sched.h)."""
_MS_REC = 16384


def encode(properties: Mapping[str, object]) -> list[Token]:
    """Return an array of name and variant, `a(sv)`, of these properties.

    Raises `InvalidInput` for a property that is not in the table and for a value that does
    not fit its type; systemd checks the rest.
    """
    tokens: list[Token] = [(ord("a"), b"(sv)")]
    for name, value in properties.items():
        # Properties of the sandbox are the same in each start, so their encoding is cached.
        is_switch = value is None or isinstance(value, bool)
        is_list = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        tokens += _encoded_cached(name, value) if is_switch or is_list else _encoded(name, value)
    return [*tokens, CLOSE]


def _encoded(name: str, value: object) -> list[Token]:
    kind = SIGNATURES.get(name)
    if kind is None:
        raise InvalidInput(
            f"cannot set {name} to {value!r}: the table of unit properties does not have it",
            hint="use the names of D-Bus, such as TimeoutStopUSec",
        )
    tokens: list[Token] = []
    try:
        for wire in _wire_values(name, kind, value):
            tokens += [(ord("r"), b"sv"), (ord("s"), _wire_name(name).encode())]
            tokens += [(ord("v"), kind.encode()), *_tokens(kind, wire), CLOSE, CLOSE]
        if name != "Environment" and kind not in _ESCAPED and any(map(_has_control, tokens)):
            raise ValueError("a control character is not allowed")
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"cannot set {name} to {value!r}: {e}") from e
    return tokens


def _has_control(token: Token) -> bool:
    return isinstance(token[1], bytes) and _CONTROL.search(token[1]) is not None


_encoded_cached = lru_cache(maxsize=128)(_encoded)


def _wire_name(name: str) -> str:
    """Return the name on the wire; commands use the extended form, which has flags."""
    return f"{name}Ex" if SIGNATURES[name] == "a(sasas)" else name


def _wire_values(name: str, kind: str, value: object) -> Iterator[object]:
    """Yield the values to assign in turn.

    A list that allows, forbids (`~`) and allows again takes one assignment each, in order.
    """
    if kind == "(bas)":
        items = _strings(value)
        for denied, group in itertools.groupby(items, lambda item: item.startswith("~")):
            yield not denied, [item.removeprefix("~") for item in group]
        if not items:
            yield True, []
        return
    convert = _BY_NAME.get(name) or _BY_KIND.get(kind)
    yield convert(value) if convert else value


def _strings(value: object) -> list[str]:
    """Return a list of strings; refuse a single string, which would be split into letters."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError("a list of strings is required")
    strings = list(value)
    if not all(isinstance(item, str) for item in strings):
        raise TypeError("a list of strings is required")
    return strings


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> object:
    return UNLIMITED if value is None else value


def _text(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _commands(value: object) -> object:
    """Return commands with literal arguments: systemd replaces no `$WORD` in them."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError("a list of argument lists is required")
    commands = [_strings(argv) for argv in value]
    if not all(commands):
        raise ValueError("a command needs at least a program")
    return [(argv[0], argv, ["no-env-expand"]) for argv in commands]


def _conditions(value: object) -> object:
    """Return commands of the host, which run as root outside the sandbox."""
    commands = _commands(value)
    assert isinstance(commands, list)
    return [(program, argv, [*flags, "privileged"]) for program, argv, flags in commands]


def _capabilities(value: object) -> object:
    if _is_number(value):
        return value
    bits = 0
    for name in _strings(value):
        short = name.upper().removeprefix("CAP_")
        if short not in _BITS:
            raise ValueError(f"there is no capability {name}")
        bits |= _BITS[short]
    return bits


def _namespaces(value: object) -> object:
    """Return the mask of allowed namespaces: none for True, all for False."""
    if isinstance(value, bool):
        return 0 if value else _ALL_NAMESPACES
    return value


def _networks(value: object) -> object:
    networks = []
    for word in _strings(value):
        for text in ("0.0.0.0/0", "::/0") if word == "any" else (word,):
            net = ipaddress.ip_network(text)
            family = socket.AF_INET if net.version == 4 else socket.AF_INET6
            networks.append((int(family), net.network_address.packed, net.prefixlen))
    return networks


def _mask(value: object) -> object:
    """Return a bit mask of CPUs or nodes, lowest byte first."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError("a list of numbers is required")
    numbers = list(value)
    bits = 0
    for number in numbers:
        if not _is_number(number) or not 0 <= number < 8192:
            raise ValueError(f"{number!r} is not the number of a CPU or node")
        bits |= 1 << number
    return bits.to_bytes(bits.bit_length() // 8 + 1, "little") if numbers else b""


def _items(value: object) -> object:
    """Return pairs: name and bytes of a credential, device and rate."""
    if not isinstance(value, Mapping):
        raise TypeError("a mapping is required")
    return list(value.items())


def _devices(value: object) -> object:
    return [_split(word, " ", "rw") for word in _strings(value)]


def _pairs(value: object) -> object:
    return [_split(word, ":", "") for word in _strings(value)]


def _binds(value: object) -> object:
    """Return mounts from `source[:target]`; with a leading `-` the source may be missing."""
    mounts = []
    for word in _strings(value):
        source, target = _split(word.removeprefix("-"), ":", "")
        mounts.append((source, target or source, word.startswith("-"), _MS_REC))
    return mounts


def _split(word: str, separator: str, default: str) -> tuple[str, str]:
    left, _, right = word.partition(separator)
    return left, right or default


_BY_NAME: dict[str, Callable[[object], object]] = {
    "AmbientCapabilities": _capabilities,
    "CapabilityBoundingSet": _capabilities,
    "DeviceAllow": _devices,
    "ExecCondition": _conditions,
    "ExecStartPre": _conditions,
    "ExecStopPost": _conditions,
    "RestrictNamespaces": _namespaces,
}
_BY_KIND: dict[str, Callable[[object], object]] = {
    "s": _text,
    "t": _number,
    "as": _strings,
    "ay": _mask,
    "a(sasas)": _commands,
    "a(say)": _items,
    "a(ss)": _pairs,
    "a(ssbt)": _binds,
    "a(st)": _items,
    "a(iayu)": _networks,
}
_RANGES = {
    "y": (0, 2**8),
    "u": (0, 2**32),
    "t": (0, 2**64),
    "i": (-(2**31), 2**31),
}


def _tokens(kind: str, value: object) -> list[Token]:
    """Return one complete value of a D-Bus type as tokens."""
    if kind[0] == "a":
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError("a list is required")
        inner = [token for item in value for token in _tokens(kind[1:], item)]
        return [(ord("a"), kind[1:].encode()), *inner, CLOSE]
    if kind[0] == "(":
        if not isinstance(value, tuple):
            raise TypeError("a tuple is required")
        parts = list(split_signature(kind[1:-1]))
        pairs = zip(parts, value, strict=True)
        inner = [token for part, item in pairs for token in _tokens(part, item)]
        return [(ord("r"), kind[1:-1].encode()), *inner, CLOSE]
    return [(ord(kind), _basic(kind, value))]


def _basic(kind: str, value: object) -> object:
    if kind == "b":
        if not isinstance(value, bool):
            raise TypeError("True or False is required")
        return value
    if kind == "s":
        if not isinstance(value, str):
            raise TypeError("a string is required")
        # It is passed as a C string: text after a NUL would silently be lost.
        if "\0" in value:
            raise ValueError("a NUL character is not allowed")
        return value.encode()
    low, high = _RANGES[kind]
    if not _is_number(value) or not low <= value < high:
        raise TypeError(f"a whole number from {low} to {high - 1} is required")
    return value


def split_signature(signature: str) -> Iterator[str]:
    """Yield the complete types of a signature: `sa(ss)b` has three."""
    start = depth = 0
    for i, letter in enumerate(signature):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter != "a":
            yield signature[start : i + 1]
            start = i + 1
