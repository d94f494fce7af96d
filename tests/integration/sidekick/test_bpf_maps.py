"""Values of pinned maps on this kernel can be read and set, and bad calls are refused."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.machine import bpf, bpf_maps
from agent.machine.bpf_maps import find_value, set_value
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

HASH = 1


def make(folder: Path, name: str, kind: int, size: int) -> None:
    """Pin a map of four values of the given size."""
    fd, _ = bpf.call(bpf.BpfCommand.MAP_CREATE, struct.pack("=5I", kind, 4, size, 4, 0))
    bpf.pin(fd, str(folder / name))
    os.close(fd)


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A bpf file system with some pinned maps."""
    subprocess.run(["mount", "-t", "bpf", "bpf", str(tmp_path)], check=True)
    try:
        for size in (1, 4, 8, 16):
            make(tmp_path, f"of{size}", bpf_maps.ARRAY, size)
        make(tmp_path, "hash", HASH, 4)
        monkeypatch.setattr(bpf_maps, "PINNED", str(tmp_path))
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.behaviour("HP7")
@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_number_is_set_read_and_given_back(pinned: Path, size: int) -> None:
    fs, name, most = KernelFs(), f"of{size}", (1 << (8 * size)) - 1
    assert find_value(fs, name, 1) == 0
    set_value(fs, name, 1, most)
    assert [find_value(fs, name, key) for key in range(4)] == [0, most, 0, 0]
    with pytest.raises(KernelFileError, match="does not fit"):
        set_value(fs, name, 1, most + 1)
    with pytest.raises(KernelFileError, match="cannot set key 4"):
        set_value(fs, name, 4, 1)
    set_value(fs, name, 1, 0)
    assert find_value(fs, name, 1) == 0


@pytest.mark.parametrize("name", ["none", "of16", "hash"])
def test_a_map_without_numbers_by_index_is_not_found(pinned: Path, name: str) -> None:
    assert find_value(KernelFs(), name, 0) is None


def test_a_key_beyond_the_last_is_not_found(pinned: Path) -> None:
    assert find_value(KernelFs(), "of4", 4) is None
