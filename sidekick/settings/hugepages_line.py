"""Huge pages on the kernel command line: `hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=200`.

Source: Linux, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SIZES = {"1g": 1 << 30, "2m": 2 << 20}
"""Bytes of a page, in the order in which pages are requested."""


class PageArguments:
    """Huge pages on a kernel command line: counts by size, and the default size."""

    def __init__(self, default: int | None, counts: Mapping[int, str]) -> None:
        """Sizes are in bytes; a count is plain, or by node as `0:16,1:32`."""
        self.default = default
        self.counts = dict(counts)

    @classmethod
    def of(cls, arguments: Iterable[str]) -> PageArguments:
        """Read the arguments in their order: a count applies to the size before it."""
        tokens = [argument.partition("=")[::2] for argument in arguments]
        sizes = (value for key, value in tokens if key == "default_hugepagesz")
        default = next((_size(value) for value in sizes), None)
        counts: dict[int, str] = {}
        size = default or SIZES["2m"]
        for key, value in tokens:
            if key == "hugepagesz":
                size = _size(value)
            elif key == "hugepages":
                counts[size] = value
        return cls(default, counts)

    def arguments(self) -> tuple[str, ...]:
        """Return all arguments, with an explicit size for each count, the largest first."""
        out = [] if self.default is None else [f"default_hugepagesz={_size_text(self.default)}"]
        for size in sorted(self.counts, reverse=True):
            out += [f"hugepagesz={_size_text(size)}", f"hugepages={self.counts[size]}"]
        return tuple(out)

    def reserved(self, size: int, node: str, nodes: int) -> int:
        """Return how many pages of a node are reserved; a plain count is spread evenly."""
        text = self.counts.get(size, "0")
        if ":" not in text:
            return int(text) // nodes if text.isdigit() else 0
        counts = dict(part.partition(":")[::2] for part in text.split(","))
        count = counts.get(node.removeprefix("node"), "0")
        return int(count) if count.isdigit() else 0


def _size(text: str) -> int:
    """Return the bytes of `2M` or `1G`; 0 for other text."""
    found = re.fullmatch(r"(\d+)([KMGkmg]?)", text)
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()] if found else 0


def _size_text(size: int) -> str:
    for shift, letter in ((30, "G"), (20, "M"), (10, "K")):
        if size and not size % (1 << shift):
            return f"{size >> shift}{letter}"
    return str(size)


def total_pages(text: str) -> int:
    """Return the pages of a count, plain or by node."""
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(count) for count in counts if count.isdigit())
