"""How large values and transactions may be, so that every engine can take them.

A distributed engine copies each transaction to every member and refuses large ones: etcd takes
128 operations and 1.5 MiB in a request unless it is told otherwise. SQLite would take more, and
users who got used to that could not move.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from control_plane.store.protocol import Operation, Put

log = logging.getLogger(__name__)
VALUE_MAX = 256 << 10
"""Bytes of one value."""
ROWS_MAX = 100
"""Operations of one transaction."""


class Bounds:
    """Looks at each transaction before it is made.

    Strict, it raises `ValueError`: a test finds code that writes too much. Else it counts, by the
    first part of the key, and logs each offender once; the transaction is made.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.offenders: Counter[str] = Counter()
        """Kind of key → transactions that were over a bound because of it."""

    def check(self, operations: Sequence[Operation]) -> None:
        """Take note of a transaction that is over a bound, or refuse it."""
        if len(operations) > ROWS_MAX:
            self._over(operations[0].key, f"{len(operations)} operations, at most {ROWS_MAX}")
        for operation in operations:
            if isinstance(operation, Put) and len(operation.value) > VALUE_MAX:
                self._over(operation.key, f"a value of {len(operation.value)} bytes")

    def _over(self, key: str, what: str) -> None:
        if self._strict:
            raise ValueError(f"a transaction is too large for every engine: {what} at {key}")
        kind = key.split("/", 1)[0]
        if kind not in self.offenders:
            log.warning("transaction is over a bound", extra={"key": key, "what": what})
        self.offenders[kind] += 1
