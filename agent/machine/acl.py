"""Gives a group access to a file by an access control list (acl(5)), which its owner may set.

`chown` to a group needs a system call that the agent's unit may not make (docs/adr/0109).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

_XATTR = "system.posix_acl_access"
_VERSION = struct.pack("<I", 2)
_USER_OBJ, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFF_FFFF
"""Layout and numbers: Linux, include/uapi/linux/posix_acl_xattr.h and posix_acl.h."""
_READ_WRITE = 6


def allow_group(path: Path, gid: int) -> None:
    """Allow only the owner and members of a group to read and write a file.

    Raises `OSError` if the file system has no access lists.
    """
    entries = (
        (_USER_OBJ, _READ_WRITE, _NO_ID),
        (_GROUP_OBJ, 0, _NO_ID),
        (_GROUP, _READ_WRITE, gid),
        (_MASK, _READ_WRITE, _NO_ID),
        (_OTHER, 0, _NO_ID),
    )
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, _XATTR, _VERSION + packed)
