"""What filters of system calls of units have in common."""

from __future__ import annotations

NO_RINGS = ("~io_uring_enter", "~io_uring_register", "~io_uring_setup")
"""What is asked for through a ring the kernel does past every filter of system calls: sockets of
any family, above all (io_uring_enter(2), IORING_OP_SOCKET). So nobody in a sandbox has rings."""
