"""The shelves of a bucket: by what is left of a machine, and in which order they are looked at."""

from __future__ import annotations

CUTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of a machine's room between which it is on one shelf."""
CLASSES = len(CUTS) + 1
BY_ROOM = sorted(
    ((rru, memory) for rru in range(CLASSES) for memory in range(CLASSES)),
    key=lambda c: (min(c), sum(c)),
    reverse=True,
)
"""Classes of RRU and memory left, most room first."""
SHELF = {classes: 1 + place for place, classes in enumerate(BY_ROOM)}
SHELF_OF = [[SHELF[rru, memory] for memory in range(CLASSES)] for rru in range(CLASSES)]
EMPTY, BLOCKED = 0, 1 + len(BY_ROOM)
"""Shelves are numbered as they are looked at: the machines without tasks, those with room by
its classes, the unusable."""
ORDERS = {
    (rru, memory): (
        EMPTY,
        *(shelf for (r, m), shelf in SHELF.items() if r >= rru and m >= memory),
    )
    for rru, memory in BY_ROOM
}
"""By the least classes of RRU and memory that may do: the shelves to look at."""
BY_TIGHTNESS = {
    (rru, memory): [
        [shelf for (r, m), shelf in SHELF.items() if r >= rru and m >= memory and min(r, m) == low]
        for low in range(CLASSES)
    ]
    for rru, memory in BY_ROOM
}
"""The same, least room first: shelves between which the lesser of the two shares decides."""
QUARTERS = (1 / 4, 1 / 2, 3 / 4)
MOST_GPUS = len(BY_ROOM) // (len(QUARTERS) + 1) - 1
BY_GPUS = {
    (gpus, rru): (
        *(1 + g * 4 + r for g in range(gpus, MOST_GPUS + 1) for r in range(rru, 4)),
        EMPTY,
    )
    for gpus in range(MOST_GPUS + 1)
    for rru in range(4)
}
"""Machines with GPUs are on shelves by how many are left, and by quarters of their RRU. By the
least of both that will do: the shelves to look at, those with fewest GPUs left first."""
