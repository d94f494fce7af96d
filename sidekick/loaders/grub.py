"""GRUB: our entry is in custom.cfg, which the installed grub.cfg reads at every boot.

So `update-grub` is not needed, which may fail or be missing, and changes every entry at once. Our
entry is a copy of the host's default one with another line. It is the default only if the file sets
it, and not in a boot for which another entry was selected. Source of the syntax and of
`next_entry`: the GRUB manual, "custom.cfg" in /etc/grub.d/41_custom and "grub-reboot"; tested with
GRUB 2.06 of Debian 12.
"""

from __future__ import annotations

import re

import msgspec

from sidekick.bootline import tokens_of
from sidekick.loaders.entry import Entry, check_staged
from sidekick.setting import Host
from wire.errors import HostError

FOLDER = "/boot/grub"
MENU = f"{FOLDER}/grub.cfg"
CUSTOM = f"{FOLDER}/custom.cfg"
ENVIRONMENT = f"{FOLDER}/grubenv"
ONCE = "/usr/sbin/grub-reboot"
ID = "twine"
BEGIN = "### BEGIN twine: written by sidekick, do not edit"
END = "### END twine"
_STATE_NOTE = "# before: "
_NO_FILE, _NO_NEWLINE, _UNCHANGED = "no file", "no final newline", "as it is"
"""The state of the file before our block, so that `clear` can restore it."""
WRITABLE = frozenset({"ext2", "ext3", "ext4", "xfs", "vfat"})
"""File systems on which GRUB can record that an entry was tried, unless they are on LVM or a RAID.
On others it would boot the new entry repeatedly."""
_ENTRY = re.compile(r"^(?:menuentry|submenu) ([^\n]*)\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
"""An entry of the menu, or a submenu: its head and its body."""


class _MenuEntry(msgspec.Struct, frozen=True):
    """An entry that boots Linux."""

    body: tuple[str, ...]
    kernel: str
    line: str
    access: str
    """Its options that say who may boot it, where the menu has a password."""


class Grub:
    """GRUB 2 with its files below /boot/grub."""

    name = "GRUB"

    def is_present(self, host: Host) -> bool:
        """Return whether the menu is GRUB's and reads custom.cfg."""
        menu = _menu(host)
        return "custom.cfg" in menu and _first_linux_entry(menu) is not None

    def own_line(self, host: Host) -> str | None:
        """Return the line of the menu's default entry."""
        first = _default_entry(host)
        return first.line if first else None

    def read(self, host: Host) -> Entry | None:
        """Return our entry; a damaged one, or one of another menu, has no line."""
        found = _block(host.fs.find(CUSTOM) or "")
        if found is None:
            return None
        entry = _first_linux_entry(found)
        if entry is None:
            return Entry(line="")
        first = _default_entry(host)
        default = f'set default="{ID}"' in found
        version = "" if first and entry.kernel == first.kernel else _version_in(entry.kernel)
        written = Entry(line=entry.line, version=version, default=default)
        # after an update of the menu the rest of our copy may be stale
        fresh = first and _without_state_note(found) == _block_text(first, written)
        return written if fresh else Entry(line="")

    def as_read_back(self, host: Host, entry: Entry) -> Entry:
        """Return the entry; without a version if that is the version of the default's kernel."""
        first = _default_entry(host)
        if (
            first
            and entry.version
            and _path_of_version(first.kernel, entry.version) == first.kernel
        ):
            return Entry(line=entry.line, default=entry.default)
        return entry

    def stage(self, host: Host, entry: Entry) -> str:
        """Write our block of custom.cfg; the rest of the file stays unchanged."""
        first = _default_entry(host)
        if first is None:
            raise HostError(f"cannot stage the command line: {MENU} has no entry to copy")
        entry = self.as_read_back(host, entry)
        text = _with_block(_read_unchanged(host, CUSTOM), _block_text(first, entry))
        host.disk.write(host.fs.path(CUSTOM), text)
        check_staged(self, host, entry, CUSTOM)
        return f"staged in {CUSTOM}, {'the default' if entry.default else 'tried once first'}"

    def clear(self, host: Host) -> None:
        """Remove our block; also the file, if sidekick created it."""
        text = _read_unchanged(host, CUSTOM) or ""
        block = _block(text)
        if block is not None:
            left = _without_block(text, block)
            path = host.fs.path(CUSTOM)
            note = _state_before(block)
            if left.strip() if note is None else left or note != _NO_FILE:
                host.disk.write(path, left)
            else:
                host.disk.remove(path.resolve())
        if _variable(host, "next_entry") == ID:
            host.processes.run(["grub-editenv", ENVIRONMENT, "unset", "next_entry"])

    def why_no_boot_once(self, host: Host) -> str:
        """Return what is missing: the program, or a file system that GRUB can write."""
        if not host.fs.exists(ONCE):
            return f"there is no {ONCE}"
        kind, device = _file_system(host)
        below = (
            [kind] if kind not in WRITABLE else _read_only_layers(host, f"/sys/dev/block/{device}")
        )
        if below:
            return f"GRUB cannot record on {below[0]} that an entry was tried"
        return ""

    def boot_once(self, host: Host) -> None:
        """Select our entry for the next boot, and read that back."""
        host.processes.run([ONCE, ID])
        if _variable(host, "next_entry") != ID:
            raise HostError(f"grub-reboot ran, but {ENVIRONMENT} does not name the entry")


def _menu(host: Host) -> str:
    """Return the menu, with a line that ends in a backslash joined to the next one."""
    return (host.fs.find(MENU) or "").replace("\\\n", "")


def _default_entry(host: Host) -> _MenuEntry | None:
    """Return the entry that the host boots by default: the one that the menu names, or the first.

    A name is a number, title or id, after the names of its submenus: `1>0`.
    """
    menu = _menu(host)
    names = re.findall(r'set default="([^"]*)"', menu)
    name = next((each for each in names if each != "${next_entry}"), "")
    if name == "${saved_entry}":
        name = _variable(host, "saved_entry")
    text = entry = menu
    for part in name.split(">"):
        named = (
            each
            for number, each in enumerate(_ENTRY.finditer(text))
            if part == str(number) or f"'{part}'" in each[1]
        )
        found = next(named, None)
        if found is None:
            return _first_linux_entry(menu)
        entry, text = found[0], re.sub(r"^\t", "", found[2], flags=re.MULTILINE)
    return _first_linux_entry(entry) or _first_linux_entry(menu)


def _first_linux_entry(menu: str) -> _MenuEntry | None:
    """Return the first entry that boots Linux."""
    for found in re.finditer(r"^menuentry ([^\n]*)\{\n(.*?)^\}", menu, re.MULTILINE | re.DOTALL):
        head, body = found.groups()
        linux = re.search(r"^\s*linux(?:efi|16)?\s+(\S+)[ \t]*(.*)$", body, re.MULTILINE)
        if linux:
            tokens, inits = tokens_of(linux[2])
            access = " ".join(re.findall(r"--(?:unrestricted|users(?:=|\s+)\S+)", head))
            return _MenuEntry(tuple(body.splitlines()), linux[1], " ".join(tokens + inits), access)
    return None


def _block_text(own: _MenuEntry, entry: Entry) -> str:
    """Return our block: the host's default entry with our line and kernel."""
    body = []
    for line in own.body:
        word = line.split()
        if word and re.fullmatch(r"linux(efi|16)?", word[0]):
            line = f"\tlinux\t{_path_of_version(own.kernel, entry.version)} {entry.line}"
        elif word and word[0].startswith("initrd") and len(word) > 1:
            images = (_path_of_version(path, entry.version) for path in word[1:])
            line = f"\tinitrd\t{' '.join(images)}"
        body.append(line)
    head = " ".join(filter(None, ('menuentry "The host\'s profile" --id', ID, own.access, "{")))
    lines = [BEGIN, head, *body, "}"]
    if entry.default:
        lines.append(f'if [ "${{boot_once}}" != "true" ]; then set default="{ID}"; fi')
    return "\n".join([*lines, END])


def _path_of_version(path: str, version: str) -> str:
    """Return the path of another version's kernel or initial RAM disk, in the same folder."""
    folder, _, name = path.rpartition("/")
    stem = re.match(r"(vmlinuz|initrd\.img|initramfs)", name)
    return f"{folder}/{stem[1]}-{version}" if version and stem else path


def _version_in(path: str) -> str:
    return path.rpartition("/")[2].partition("-")[2]


def _block(text: str) -> str | None:
    """Return our block; a block without an end marker extends to the end of the file."""
    at = text.find(BEGIN)
    if at < 0:
        return None
    end = text.find(END, at)
    return text[at : end + len(END)] if end >= 0 else text[at:]


def _state_before(block: str) -> str | None:
    """Return the state of the file before our block; None if an earlier release wrote it."""
    found = re.search(rf"^{_STATE_NOTE}(.*)$", block, re.MULTILINE)
    return found[1] if found else None


def _without_state_note(block: str) -> str:
    return re.sub(rf"^{_STATE_NOTE}.*\n", "", block, count=1, flags=re.MULTILINE)


def _with_block(text: str | None, block: str) -> str:
    """Return the file with this block instead of its present one, or at its end."""
    before = _block(text or "")
    glue = ""
    if before is not None:
        note = _state_before(before)
    elif not text:
        note = _NO_FILE if text is None else _UNCHANGED
    else:
        note = _UNCHANGED if text.endswith("\n") else _NO_NEWLINE
        glue = "" if note == _UNCHANGED else "\n"
    noted = block if note is None else block.replace(BEGIN, f"{BEGIN}\n{_STATE_NOTE}{note}", 1)
    if text is None or before is None:
        return f"{text or ''}{glue}{noted}\n"
    head, _, tail = text.partition(before)
    return head + noted + (tail or "\n")


def _without_block(text: str, block: str) -> str:
    """Return the file without our block, with all later additions."""
    head, _, tail = text.partition(block)
    tail = tail.removeprefix("\n")
    return (
        head.removesuffix("\n") if _state_before(block) == _NO_NEWLINE and not tail else head + tail
    )


def _read_unchanged(host: Host, path: str) -> str | None:
    """Return the text of a file, white space included, so that other parts stay unchanged."""
    found = host.fs.find_bytes(path)
    return None if found is None else found.decode(errors="surrogateescape")


def _variable(host: Host, name: str) -> str:
    """Return a variable of the environment block."""
    lines = (host.fs.find(ENVIRONMENT) or "").splitlines()
    return next((x.partition("=")[2] for x in lines if x.startswith(f"{name}=")), "")


def _file_system(host: Host) -> tuple[str, str]:
    """Return type and device of the file system that holds the menu.

    It is that of the longest mount point; of several mounts at one point the last one counts.
    """
    from agent.machine.mounts import read_mounts  # loads the C library: for a reboot alone

    inside = [
        mount
        for mount in read_mounts(host.fs)
        if mount.point == FOLDER or FOLDER.startswith(mount.point.rstrip("/") + "/")
    ]
    if not inside:
        return "an unknown file system", ""
    nearest = sorted(inside, key=lambda mount: len(mount.point))[-1]
    return nearest.kind, nearest.device


def _read_only_layers(host: Host, device: str) -> list[str]:
    """Return the layers of a device that GRUB only reads (its module diskfilter)."""
    found = []
    if (host.fs.find(f"{device}/dm/uuid") or "").startswith("LVM-"):
        found.append("LVM")
    if any(host.fs.exists(f"{device}/{md}") for md in ("md", "../md")):  # "..": of a partition
        found.append("a software RAID")
    for name in host.fs.names(f"{device}/slaves"):
        found += _read_only_layers(host, f"/sys/class/block/{name}")
    return found
