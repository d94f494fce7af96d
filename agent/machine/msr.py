"""Model-specific registers of x86 processors, through the kernel's `msr` driver.

A register is the eight bytes at the offset of its number in the binary file /dev/cpu/N/msr (Linux,
msr(4)). A kernel that filters writes refuses some (`msr.allow_writes`).
"""

from __future__ import annotations

import os

from agent.machine.descriptors import closing
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError


def find_msr(fs: KernelFs, cpu: int, register: int) -> int | None:
    """Return a register of one processor, None without the driver or the register."""
    found = fs.find_at(_path(cpu), register, 8)
    return None if found is None else int.from_bytes(found, "little")


def write_msr(fs: KernelFs, cpu: int, register: int, value: int) -> None:
    """Set a register of one processor."""
    try:
        with closing(os.open(fs.path(_path(cpu)), os.O_WRONLY)) as fd:
            os.pwrite(fd, value.to_bytes(8, "little"), register)
    except OSError as e:
        raise KernelFileError(
            f"cannot set register {register:#x} of processor {cpu}: {e.strerror}",
            hint="load the msr module; kernels since 5.9 write only with msr.allow_writes=on",
        ) from e


def _path(cpu: int) -> str:
    return f"/dev/cpu/{cpu}/msr"
