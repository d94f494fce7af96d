"""The stream of an image layer: decompression and digest."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from agent.machine.process import filtered
from wire.errors import Unprocessable

CHUNK = 1 << 20
"""Bytes of one read."""


@contextmanager
def uncompressed(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    """Yield the uncompressed content of a layer; `compression` is tar, gzip or zstd."""
    if compression == "tar":
        yield file
    elif compression == "gzip":
        yield cast(BinaryIO, _Gunzip(file))
    elif compression == "zstd":
        with filtered(["zstd", "-q", "-d", "-c"], file) as plain:
            yield plain
    else:
        raise Unprocessable(f"compression {compression!r} is not supported")


class _Gunzip:
    """Reads gzip with one or more members, and checks the checksum of each."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""
        self._over = False

    def read(self, size: int) -> bytes:
        while not self._over:
            if not self._input:
                self._input = self._source.read(CHUNK)
                if not self._input:
                    if not self._member.eof:
                        raise EOFError("the layer ends within its compressed data")
                    self._over = True
                    break
            if self._member.eof:
                if not self._input.strip(b"\0"):  # padding, which gzip(1) also accepts
                    self._input = b""
                    continue
                self._member = zlib.decompressobj(wbits=31)
            data = self._member.decompress(self._input, size)
            self._input = self._member.unconsumed_tail or self._member.unused_data
            if data:
                return data
        return b""


class Hashing:
    """Passes a stream on, and computes its digest while it is read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._sha = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self._sha.update(data)
        self.bytes += len(data)
        return data

    def finish(self) -> None:
        """Read the rest after the end of the archive: it belongs to the digest."""
        while self.read(CHUNK):
            pass

    @property
    def digest(self) -> str:
        return "sha256:" + self._sha.hexdigest()
