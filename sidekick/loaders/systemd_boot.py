"""systemd-boot: our entry is a separate file next to the host's.

EFI variables select the entry to boot, through bootctl(1): `set-oneshot` for the next boot
alone, `set-default` after a healthy boot. Source of the files: the Boot Loader
Specification of the UAPI group; of the variables: the Boot Loader Interface.
"""

from __future__ import annotations

import re

import msgspec

from sidekick.bootline import tokens_of
from sidekick.loaders.entry import Entry, check_staged
from sidekick.setting import Host
from wire.errors import HostError

PARTITIONS = ("/efi", "/boot/efi", "/boot")
"""Where bootctl(1) searches for the partition, in its order."""
NAME = "twine.conf"
VARIABLES = "/sys/firmware/efi/efivars"
_VENDOR = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
_BEFORE = "# default before: "
_SOURCE = "# copy of: "
_FIELD = re.compile(r"^[ \t]*([^\s#]\S*)[ \t]+(.*?)[ \t]*$", re.MULTILINE)
"""A key and its value; systemd-boot skips white space before the key."""


class _LoaderFile(msgspec.Struct, frozen=True):
    name: str
    text: str
    version: str
    line: str


class SystemdBoot:
    """systemd-boot with entries of type 1."""

    name = "systemd-boot"

    def is_present(self, host: Host) -> bool:
        """Return whether it booted this host, and there is an entry to copy."""
        is_loader = _variable(host, "LoaderInfo").startswith("systemd-boot")
        return is_loader and _host_entry(host) is not None

    def own_line(self, host: Host) -> str | None:
        """Return the options of the entry that the host boots by default."""
        own = _host_entry(host)
        return own.line if own else None

    def read(self, host: Host) -> Entry | None:
        """Return our entry; a damaged one, or a copy of an old entry, has no line."""
        folder = _entries_folder(host)
        text = host.fs.find(f"{folder}/{NAME}") if folder else None
        default = _variable(host, "LoaderEntryDefault") == NAME
        if text is None:
            return Entry(line="", default=True) if default else None
        own, ours = _host_entry(host), _parse(NAME, text)
        copied = _host_entry(host, ours.version) if ours else None
        if own is None or ours is None or copied is None:
            return Entry(line="")
        version = "" if ours.version == own.version else ours.version
        written = Entry(line=ours.line, version=version, default=default)
        fresh = _without_notes(text) == _without_notes(_file_text(copied, written, ""))
        return written if fresh else Entry(line="")

    def as_read_back(self, host: Host, entry: Entry) -> Entry:
        """Return the entry; without a version if that is the version of the host's own entry."""
        own = _host_entry(host)
        if own and entry.version == own.version:
            return Entry(line=entry.line, default=entry.default)
        return entry

    def stage(self, host: Host, entry: Entry) -> str:
        """Write our file, and set or unset it as the default."""
        entry = self.as_read_back(host, entry)
        folder, own = _entries_folder(host), _host_entry(host, entry.version)
        if folder is None or own is None:
            raise HostError(
                f"cannot stage the command line: systemd-boot has no entry for "
                f"{entry.version or 'the running kernel'} to copy"
            )
        path = f"{folder}/{NAME}"
        before = _variable(host, "LoaderEntryDefault")
        noted = _note_value(host.fs.find(path) or "", _BEFORE) if before == NAME else before
        if before == NAME and not entry.default:
            host.processes.run(["bootctl", "set-default", noted])
        host.disk.write(host.fs.path(path), _file_text(own, entry, noted))
        if entry.default and before != NAME:
            host.processes.run(["bootctl", "set-default", NAME])
        check_staged(self, host, entry, path)
        return f"staged in {path}, {'the default' if entry.default else 'tried once first'}"

    def clear(self, host: Host) -> None:
        """Restore the default, then remove our file."""
        folder = _entries_folder(host)
        path = f"{folder}/{NAME}"
        if _variable(host, "LoaderEntryDefault") == NAME:
            before = _note_value(host.fs.find(path) or "", _BEFORE) if folder else ""
            host.processes.run(["bootctl", "set-default", before])
        if _variable(host, "LoaderEntryOneShot") == NAME:
            host.processes.run(["bootctl", "set-oneshot", ""])
        if folder and host.fs.exists(path):
            host.disk.remove(host.fs.path(path))

    def why_no_boot_once(self, host: Host) -> str:
        """Return that the program is missing, "" if it is installed."""
        if not any(host.fs.exists(f"{folder}/bootctl") for folder in ("/usr/bin", "/bin")):
            return "the program bootctl is not installed"
        return ""

    def boot_once(self, host: Host) -> None:
        """Select our entry for the next boot, and read that back."""
        host.processes.run(["bootctl", "set-oneshot", NAME])
        if _variable(host, "LoaderEntryOneShot") != NAME:
            raise HostError("bootctl set-oneshot ran, but the variable does not name the entry")


def _entries_folder(host: Host) -> str | None:
    folders = (f"{partition}/loader/entries" for partition in PARTITIONS)
    return next((f for f in folders if host.fs.names(f)), None)


def _entries(host: Host, folder: str) -> list[str]:
    return [n for n in host.fs.names(folder) if n.endswith(".conf") and n != NAME]


def _host_entry(host: Host, version: str = "") -> _LoaderFile | None:
    """Return the host's entry of a version; for "" of the running kernel, or the newest one.

    Of several, it is the one that booted. If our entry booted, it is the one that ours copies.
    """
    folder = _entries_folder(host)
    if folder is None:
        return None
    names = _entries(host, folder)
    files = [_parse(name, host.fs.find(f"{folder}/{name}") or "") for name in names]
    found = sorted((file for file in files if file), key=_version_key, reverse=True)
    exact = [file for file in found if file.version == (version or host.hardware.kernel)]
    fitting = exact if version else exact or found
    selected = _variable(host, "LoaderEntrySelected")
    if selected == NAME:
        selected = _note_value(host.fs.find(f"{folder}/{NAME}") or "", _SOURCE)
    booted = (file for file in fitting if _entry_id(file.name) == _entry_id(selected))
    return next(booted, next(iter(fitting), None))


def _entry_id(name: str) -> str:
    """Return the identifier of an entry: its file name without the counters of boot attempts."""
    return re.sub(r"\+[0-9]+(-[0-9]+)?(?=\.conf$)", "", name.lower())


def _version_key(file: _LoaderFile) -> list[str | int]:
    """Return the version for comparisons: its numbers as numbers, so that 6.9 is before 6.10."""
    parts = re.split(r"([0-9]+)", file.version)  # numbers are at odd places
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _parse(name: str, text: str) -> _LoaderFile | None:
    fields = [(key, _unquoted(value)) for key, value in _FIELD.findall(text)]
    values = dict(fields)
    if "linux" not in values:
        return None
    options = " ".join(value for key, value in fields if key == "options")
    tokens, inits = tokens_of(options)
    version = values.get("version") or values["linux"].rpartition("/")[2].partition("-")[2]
    return _LoaderFile(name, text, version, " ".join(tokens + inits))


def _unquoted(value: str) -> str:
    """Return a value without the quotes around it, which systemd-boot removes."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _file_text(own: _LoaderFile, entry: Entry, before: str) -> str:
    replaced = re.compile(r"\s*(?:(?:title|options|sort-key)\b|#)")
    kept = [line for line in own.text.splitlines() if not replaced.match(line)]
    notes = [f"{_BEFORE}{before}", f"{_SOURCE}{own.name}"]
    head = ["# Written by sidekick: do not edit.", *notes, "title The host's profile"]
    return "\n".join([*head, *kept, f"options {entry.line}"]) + "\n"


def _without_notes(text: str) -> list[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#")]


def _note_value(text: str, note: str) -> str:
    """Return the value of a note in our file."""
    lines = (x for x in text.splitlines() if x.startswith(note.rstrip()))
    return next((x.removeprefix(note.rstrip()) for x in lines), "").strip()


def _variable(host: Host, name: str) -> str:
    """Return an EFI variable's text: after four bytes of attributes, UTF-16 with a NUL."""
    data = host.fs.find_bytes(f"{VARIABLES}/{name}-{_VENDOR}") or b""
    return data[4:].decode("utf-16-le", errors="replace").rstrip("\0")
