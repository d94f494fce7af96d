"""The class of a machine: all properties that feasibility and scarcity compare, one object each.

Machines of one class in one MSB share a bucket, so everything that a bucket says of its machines
must be here. Memory and disk count to five binary digits: agents report what the kernel left of
them, which differs a little between machines that are otherwise alike.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakValueDictionary

from control_plane.broker.core.capacity import Capacity

_DIGITS = 5
Key = tuple[object, ...]
_KNOWN: WeakValueDictionary[Key, Capacity] = WeakValueDictionary()
"""The one object of each class, as long as a bucket has it."""


def class_key(capacity: Capacity) -> Key:
    """Return what machines of one class have in common."""
    return (
        *(capacity.machine_type, capacity.generation, capacity.sku, capacity.gpu_type),
        *(capacity.rru, capacity.cpus, capacity.gpus, capacity.network_mbps, capacity.power_w),
        *(_rounded(capacity.memory_bytes), _rounded(capacity.disk_bytes)),
    )


def class_of(capacity: Capacity) -> Capacity:
    """Return the least that machines of this class offer, without labels and capabilities."""
    key = class_key(capacity)
    found = _KNOWN.get(key)
    if found is None:
        memory, disk = _rounded(capacity.memory_bytes), _rounded(capacity.disk_bytes)
        found = _KNOWN[key] = replace(
            capacity,
            memory_bytes=memory,
            disk_bytes=disk,
            labels=(),
            capabilities=frozenset(),
        )
    return found


def _rounded(size: int) -> int:
    """Return a size rounded down to its first binary digits."""
    rest = size.bit_length() - _DIGITS
    return size >> rest << rest if rest > 0 else size
