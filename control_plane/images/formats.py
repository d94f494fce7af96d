"""Detects the format of a file that is pushed as an image, by its first bytes.

The image store accepts any stream that has its digest, and an agent learns its content only when it
unpacks it. Without this check each host, but not the push, would refuse a file of another kind.
"""

from __future__ import annotations

from agent.api import ImageFormat

HEAD_BYTES = 512
"""One block of a tar: its first header."""
_BTRFS = b"btrfs-stream\0"
"""First bytes of `btrfs send` (Linux, fs/btrfs/send.h)."""
_PACKED = (
    *(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x5d\x00\x00", b"LZIP"),
    *(b"\x89LZO", b"\x1f\x9d"),
)
"""Compressed files that GNU tar unpacks by itself: gzip, bzip2, xz, zstd, lzma, lzip, lzop and
compress. The archive inside is visible only once it is unpacked."""
_SUM = slice(148, 156)
"""Where the header of a tar has the sum of its bytes, in octal digits (POSIX, pax)."""


def format_of(head: bytes) -> ImageFormat | None:
    """Return the format of a file with these first bytes; None: it is no image.

    An OCI archive is a tar, too: only its owner knows that (`--format oci`).
    """
    if head.startswith(_BTRFS):
        return ImageFormat.BTRFS
    return ImageFormat.TAR if head.startswith(_PACKED) or _is_tar(head) else None


def _is_tar(head: bytes) -> bool:
    """Return whether a block is the header of a tar, or the end of an empty one."""
    if len(head) < HEAD_BYTES:
        return False
    block = head[:HEAD_BYTES]
    if not any(block):
        return True
    try:
        wanted = int(block[_SUM].strip(b" \0"), 8)
    except ValueError:
        return False
    return sum(block) - sum(block[_SUM]) + 8 * ord(" ") == wanted
