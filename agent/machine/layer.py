"""Applies layers of an image to a tree. Run as a program inside a sandboxed unit:

    python -m agent.machine.layer FOLDER TREE BLOB COMPRESSION DIGEST DIFF_ID …

It reports each applied layer on its output, and continues with the next once it reads a line.

A layer is a tar of changes (`layer.md` of the OCI image specification). Its files replace existing
ones. `.wh.NAME` removes NAME of the layers below; `.wh..wh..opq` removes everything of the layers
below in its folder.

The archive is hostile input. Its digest is checked before it is read as an archive. The kernel
resolves paths inside the tree (`beneath`). Nothing is written through a link or into an existing
file. Set-uid bits and file capabilities are dropped. Device nodes are left out below /dev and
refused elsewhere. Blocks of zeros become holes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from agent.machine.beneath import open_file, open_folder
from agent.machine.descriptors import closing, opened_folder
from agent.machine.layer_stream import CHUNK, Hashing, uncompressed
from wire.errors import TwineError, Unprocessable

ENTRIES_MAX = 2_000_000
"""The most entries of one layer; the largest known images have a tenth of this."""
DEPTH_MAX = 128
BLOCK = 4096
"""Smallest size of a hole in bytes: a block of btrfs. `CHUNK` is a multiple of it."""
_ZEROS = bytes(BLOCK)
_WHITEOUT, _META, _OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
_ACLS = frozenset({"system.posix_acl_access", "system.posix_acl_default"})
_XATTR = "SCHILY.xattr."
"""Prefix of extended attributes among the PAX records (written by GNU tar, Go and libarchive)."""


_REFUSALS = (
    TwineError,
    tarfile.TarError,
    zlib.error,
    OSError,
    EOFError,
    RecursionError,
    ValueError,  # for instance a name with a zero byte
    OverflowError,  # a number that no file can have
)


def main(
    argv: list[str],
    requests: BinaryIO | None = None,
    reports: BinaryIO | None = None,
    *,
    owners: bool = True,
) -> int:
    """Apply the layers in the arguments; write one line with the reason of a failure.

    `requests` and `reports` are its input and output. It ends when its input ends before a layer.
    """
    folder, tree, *words = argv
    layers = [words[n : n + 4] for n in range(0, len(words), 4)]
    requests, reports = requests or sys.stdin.buffer, reports or sys.stdout.buffer
    try:
        for number, (blob, compression, digest, diff_id) in enumerate(layers):
            if number and not requests.readline():
                return 0
            apply(folder, blob, compression, digest, diff_id, tree, owners=owners)
            reports.write(b"applied\n")
            reports.flush()
    except _REFUSALS as e:
        hint = f" ({e.hint})" if isinstance(e, TwineError) and e.hint else ""
        sys.stderr.write(f"{e}{hint}\n")  # to the journal, where the agent reads it
        return 1
    return 0


def apply(
    folder: str,
    blob: str,
    compression: str,
    digest: str,
    diff_id: str,
    tree: str,
    *,
    owners: bool = True,
) -> None:
    """Apply the layer in `blob` below `folder` to the folder `tree`.

    Without `owners` all files belong to the caller: for tests without root. Raises
    `Unprocessable`, `OSError` or tarfile's errors if the layer cannot or must not be applied. The
    tree is then incomplete.
    """
    fd = open_file(folder, blob)
    with os.fdopen(fd, "rb") as file:
        actual = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest:
            raise Unprocessable(f"the layer has digest {actual}, not {digest}")
        file.seek(0)
        with uncompressed(file, compression) as plain:
            hashing = Hashing(plain)
            with opened_folder(tree) as root:
                _Applier(root, owners=owners).run(hashing)
            hashing.finish()
    if hashing.digest != diff_id:
        raise Unprocessable(f"the uncompressed content has digest {hashing.digest}, not {diff_id}")


@dataclass(slots=True)
class _Applier:
    root: int
    owners: bool
    entries: int = 0
    _made: set[tuple[int, str]] = field(default_factory=set)
    """Folder (inode) and name of each entry that this layer made: its whiteouts keep these."""
    _times: dict[str, int] = field(default_factory=dict)
    """Folder → its time of last change, which is set at the end."""

    def run(self, stream: Hashing) -> None:
        try:
            with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|", bufsize=CHUNK) as tar:
                self._entries(tar)
        except tarfile.ReadError:
            if stream.bytes:  # an empty stream is an empty archive, as in other tools
                raise
        for path, at in self._times.items():
            try:
                fd = open_folder(self.root, path)
            except OSError as e:
                if e.errno in (errno.ENOENT, errno.ENOTDIR):
                    continue  # removed by a later entry
                raise
            with closing(fd):
                os.utime(fd, ns=(at, at))

    def _entries(self, tar: tarfile.TarFile) -> None:
        while (member := tar.next()) is not None:
            self.entries += 1
            if self.entries > ENTRIES_MAX:
                raise Unprocessable(f"more than {ENTRIES_MAX:,} entries")
            cast(Any, tar).members.clear()  # else tarfile keeps them all in memory
            try:
                self._entry(tar, member)
            except OSError as e:  # its own text has only a part of the path, or a descriptor
                to = f", a link to {member.linkname[:200]!r}," if member.islnk() else ""
                why = e.strerror or str(e)
                raise Unprocessable(f"{member.name[:200]!r}{to} cannot be created: {why}") from e

    def _entry(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            if member.isdir():
                self._folder_at(self.root, member)
                self._times[""] = _mtime_ns(member)
            return
        with closing(self._parent(parts[:-1])) as parent:
            self._apply_entry(tar, member, parent, parts)

    def _apply_entry(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, parts: list[str]
    ) -> None:
        name = parts[-1]
        if name == _OPAQUE:
            for child in os.listdir(parent):
                self._remove_lower(parent, child)
        elif name.startswith(_META):
            pass  # metadata of aufs
        elif name.startswith(_WHITEOUT):
            gone = name.removeprefix(_WHITEOUT)
            if gone in ("", ".", ".."):
                raise Unprocessable(f"{member.name!r} removes an entry without a name")
            self._remove_lower(parent, gone)
        elif not ((member.ischr() or member.isblk()) and parts[0] == "dev"):
            self._make(tar, member, parent, name)
            self._made.add((os.fstat(parent).st_ino, name))
            if member.isdir():
                self._times["/".join(parts)] = _mtime_ns(member)

    def _parent(self, parts: list[str]) -> int:
        """Open the folder of an entry; create folders that no layer contains."""
        try:
            return open_folder(self.root, "/".join(parts))
        except FileNotFoundError:
            above = self._parent(parts[:-1])
        with closing(above):
            os.mkdir(parts[-1], 0o755, dir_fd=above)
            self._made.add((os.fstat(above).st_ino, parts[-1]))
            return open_folder(above, parts[-1])

    def _remove_lower(self, parent: int, name: str) -> None:
        """Remove the entry of lower layers at a name; entries of this layer stay."""
        try:
            existing = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        is_own = (os.fstat(parent).st_ino, name) in self._made
        if not stat.S_ISDIR(existing.st_mode):
            if not is_own:
                os.unlink(name, dir_fd=parent)
            return
        with closing(os.open(name, _FOLDER, dir_fd=parent)) as fd:
            for child in os.listdir(fd):
                self._remove_lower(fd, child)
            empty = not os.listdir(fd)
        if empty and not is_own:
            os.rmdir(name, dir_fd=parent)

    def _clear(self, parent: int, name: str, *, keep_folder: bool) -> bool:
        """Remove the entry at a name; return whether a folder was kept."""
        try:
            existing = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(existing.st_mode):
            os.unlink(name, dir_fd=parent)
            return False
        if keep_folder:
            return True
        shutil.rmtree(name, dir_fd=parent)
        return False

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if not (
            member.isdir() or member.isreg() or member.issym() or member.islnk() or member.isfifo()
        ):
            kind = "device node" if member.ischr() or member.isblk() else f"{member.type!r}"
            raise Unprocessable(f"{member.name!r} is a {kind}, which images cannot contain")
        if member.islnk():
            return self._link(member, parent, name)
        kept = self._clear(parent, name, keep_folder=member.isdir())
        if member.isdir():
            if not kept:
                os.mkdir(name, 0o700, dir_fd=parent)
            with closing(os.open(name, _FOLDER, dir_fd=parent)) as fd:
                self._folder_at(fd, member, fresh=not kept)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            if self.owners:
                os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            at = _mtime_ns(member)
            os.utime(name, ns=(at, at), dir_fd=parent, follow_symlinks=False)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            with closing(os.open(name, os.O_RDONLY | os.O_NONBLOCK | _SAFE, dir_fd=parent)) as fd:
                self._finish(fd, member)
        else:
            self._file(tar, member, parent, name)
        return None

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        pieces = _pieces(member)
        data = cast(Any, tar.extractfile(member)).raw  # its buffer cannot seek in a stream
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        with closing(os.open(name, new, 0o600, dir_fd=parent)) as fd:
            for at, left in pieces:
                data.seek(at)  # skips holes, which tarfile would fill with zeros
                while chunk := data.read(min(left, CHUNK)):
                    _write(fd, chunk, at)
                    at, left = at + len(chunk), left - len(chunk)
            os.ftruncate(fd, member.size)
            self._finish(fd, member)

    def _link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        target = _parts(member.linkname)
        if not target:
            raise Unprocessable(f"{member.name!r} is a hard link to something that is not a file")
        with closing(open_folder(self.root, "/".join(target[:-1]))) as folder:
            existing = os.stat(target[-1], dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(existing.st_mode):
                raise Unprocessable(f"{member.name!r} is a hard link to a folder")
            if (os.fstat(folder).st_ino, target[-1]) == (os.fstat(parent).st_ino, name):
                return
            self._clear(parent, name, keep_folder=False)
            os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)

    def _folder_at(self, fd: int, member: tarfile.TarInfo, *, fresh: bool = True) -> None:
        if not fresh:
            for attribute in os.listxattr(fd):
                if _is_allowed(attribute):
                    os.removexattr(fd, attribute)
        self._finish(fd, member)

    def _finish(self, fd: int, member: tarfile.TarInfo) -> None:
        """Set owner, attributes, mode and time of an entry, in this order."""
        if self.owners:
            os.fchown(fd, member.uid, member.gid)
        for key, value in member.pax_headers.items():
            attribute = key.removeprefix(_XATTR)
            if attribute != key and _is_allowed(attribute):
                os.setxattr(fd, attribute, value.encode(errors="surrogateescape"))
        os.fchmod(fd, member.mode & 0o1777)
        at = _mtime_ns(member)
        os.utime(fd, ns=(at, at))


_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _SAFE


def _pieces(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Return offset and length in bytes of the pieces of a file that the archive contains.

    The rest of the file is holes, from GNU tar's map of holes in any of its formats.
    """
    held: list[tuple[int, int]] | None = cast(Any, member).sparse
    if held is None:
        return [(0, member.size)]
    if not 0 <= member.size < 1 << 63:
        raise Unprocessable(
            f"{member.name[:200]!r} has {member.size} bytes, which is impossible for a file"
        )
    pieces = [(at, length) for at, length in held if length]  # an empty piece marks the end
    end = 0
    for at, length in pieces:
        if length < 0 or not end <= at <= member.size - length:
            raise Unprocessable(
                f"{member.name[:200]!r} has an impossible map of holes: {length} bytes "
                f"at {at}, after {end} and of {member.size}"
            )
        end = at + length
    return pieces


def _write(fd: int, data: bytes, at: int) -> None:
    """Write at an empty offset of a file; whole blocks of zeros stay holes."""
    view = memoryview(data)
    for start, end in _runs(data):
        while start < end:
            start += os.pwrite(fd, view[start:end], at + start)


def _runs(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of blocks that are not all zeros."""
    start: int | None = None
    for at in range(0, len(data), BLOCK):
        if data.startswith(_ZEROS, at):
            if start is not None:
                yield start, at
            start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, len(data)


def _is_allowed(attribute: str) -> bool:
    return attribute.startswith("user.") or attribute in _ACLS


def _parts(name: str) -> list[str]:
    """Return the parts of a path inside the tree; refuse `..` and paths that are too deep."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Unprocessable(f"{name[:200]!r} points outside the image")
    if len(parts) > DEPTH_MAX:
        raise Unprocessable(f"{name[:200]!r}… is nested {len(parts)} folders deep")
    return parts


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """Return the time of the last change in nanoseconds, with the precision of the archive."""
    whole, _, part = member.pax_headers.get("mtime", "").partition(".")
    if whole.lstrip("-").isdigit() and (not part or part.isdigit()):
        return int(whole) * 10**9 + int(part[:9].ljust(9, "0"))
    return int(member.mtime) * 10**9


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
