"""Size limits of values and transactions that every engine accepts.

A distributed engine copies each transaction to every member and refuses large ones: etcd accepts
128 operations and 1.5 MiB in a request by default. SQLite would accept more, but
a region that relied on that could not move to etcd.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from control_plane.store.protocol import Operation, Put
from wire.errors import Unprocessable

log = logging.getLogger(__name__)
VALUE_MAX = 256 << 10
"""Bytes of one value."""
ROWS_MAX = 100
"""Operations of one transaction."""


class Bounds:
    """Checks each transaction before it is made.

    If strict, it raises `ValueError`: a test finds code that writes too much. Else it counts
    offenders by the first part of the key, and logs each once; the transaction is made.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.offenders: Counter[str] = Counter()
        """Kind of key → transactions that were over a bound because of it."""

    def check(self, operations: Sequence[Operation]) -> None:
        """Count a transaction that is over a bound, or raise `ValueError` if strict."""
        if len(operations) > ROWS_MAX:
            self._report(
                operations[0].key, f"{len(operations)} operations; the maximum is {ROWS_MAX}"
            )
        for operation in operations:
            if isinstance(operation, Put) and len(operation.value) > VALUE_MAX:
                self._report(operation.key, f"a value of {len(operation.value)} bytes")

    def _report(self, key: str, what: str) -> None:
        if self._strict:
            raise ValueError(f"a transaction is too large for every engine: {what} at {key}")
        kind = key.split("/", 1)[0]
        if kind not in self.offenders:
            log.warning("transaction exceeds a bound", extra={"key": key, "what": what})
        self.offenders[kind] += 1


def check_values(operations: Sequence[Operation]) -> None:
    """Raise `Unprocessable` for a value that is too large: users determine the size of some."""
    for operation in operations:
        if isinstance(operation, Put) and len(operation.value) > VALUE_MAX:
            key, size = operation.key, len(operation.value)
            raise Unprocessable(
                f"cannot write {key}: it would have {size} bytes, and the store "
                f"accepts {VALUE_MAX}",
                hint="shorten what it contains, such as command and environment of a job, of "
                "which the last versions are kept",
            )
