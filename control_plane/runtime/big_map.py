"""A dictionary for a million entries that grows without a pause."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import TypeVar, overload

V = TypeVar("V")
D = TypeVar("D")
_PARTS = 16
_SHIFT = 48
"""Uses high bits of a hash: a part's own dictionary uses the low bits first."""


class BigMap(MutableMapping[str, V]):
    """Several dictionaries behind one interface; the key's hash selects the dictionary.

    A dictionary moves all its entries whenever it grows; at 700,000 that stops the process for
    40 ms. Its parts grow one by one, in 2 ms each.
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: tuple[dict[str, V], ...] = tuple({} for _ in range(_PARTS))

    def __getitem__(self, key: str) -> V:
        """Return a value, or raise `KeyError`."""
        return self._parts[hash(key) >> _SHIFT & _PARTS - 1][key]

    def __setitem__(self, key: str, value: V) -> None:
        """Add an entry or replace it."""
        self._parts[hash(key) >> _SHIFT & _PARTS - 1][key] = value

    def __delitem__(self, key: str) -> None:
        """Remove an entry, or raise `KeyError`."""
        del self._parts[hash(key) >> _SHIFT & _PARTS - 1][key]

    @overload
    def get(self, key: str, /) -> V | None: ...

    @overload
    def get(self, key: str, default: V | D, /) -> V | D: ...

    def get(self, key: str, default: V | D | None = None, /) -> V | D | None:
        """Return a value, or the default."""
        return self._parts[hash(key) >> _SHIFT & _PARTS - 1].get(key, default)

    def __contains__(self, key: object) -> bool:
        """Return whether there is such an entry."""
        return key in self._parts[hash(key) >> _SHIFT & _PARTS - 1]

    def __iter__(self) -> Iterator[str]:
        """Yield all keys in an order that differs between processes; do not rely on it."""
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return sum(map(len, self._parts))
