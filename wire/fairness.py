"""What one caller may take of a server: places to wait, computing time, bytes of a body.

An account is what is charged: an identity, or the network that an anonymous caller comes from.
Operators and components (`Peer.is_trusted`) are charged nothing and keep a reserve of places.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from wire.errors import Busy
from wire.networks import network_of
from wire.routes import Route

Answer = TypeVar("Answer")
ANYONE = "anyone"
"""The role of a caller without a certificate."""
MAX_BODY_BYTES = 1 << 20
"""Largest body of a request that is not a stream."""
USER_BODY_BYTES = 320 << 10
"""A job file has at most 256 KiB; as JSON it is a little longer."""
ANYONE_BODY_BYTES = 128 << 10
"""A thousand jobs that are watched, each with its revision."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The identity of a caller, as proved by TLS or by the kernel."""

    name: str
    """URI SAN of the certificate, or `local:<uid>` on the unix socket."""
    role: str
    """`local`, or what follows the trust domain: `component`, `host`, `user`, …"""
    address: str = ""
    """IP address it calls from; empty on a unix socket."""
    valid_from: float = 0.0
    """When its certificate begins, in seconds since 1970."""
    is_trusted: bool = False
    """Whether it runs the server: an operator, the local socket, a component."""

    def trusted(self, is_trusted: bool) -> Peer:
        """Return the same caller, trusted or not."""
        if is_trusted is self.is_trusted:
            return self
        return Peer(self.name, self.role, self.address, self.valid_from, is_trusted)

    @property
    def account(self) -> str:
        """Return what is charged for its calls."""
        return f"{ANYONE} at {network_of(self.address)}" if self.role == ANYONE else self.name


def body_limit(route: Route, peer: Peer) -> int:
    """Return how large a body this caller may send to this route."""
    if peer.is_trusted:
        return MAX_BODY_BYTES
    return route.body_bytes or (ANYONE_BODY_BYTES if peer.role == ANYONE else USER_BODY_BYTES)


class OpenRequests:
    """Counts the requests that stay open: followed logs, images, waits for news.

    An account may hold at most a quarter of the places that are still free. So an account that
    holds none always finds one.
    """

    def __init__(self, most: int = 512, reserve: int = 64) -> None:
        """`most` is the number of places; the reserve among them is for trusted callers."""
        self._most, self._reserve = most, reserve
        self._by_account: Counter[str] = Counter()
        self._anonymous = 0

    @contextmanager
    def counted(self, peer: Peer) -> Iterator[None]:
        """Count one request for as long as it is answered, or raise `Busy`."""
        account, is_anonymous = peer.account, peer.role == ANYONE
        held, total = self._by_account[account], self._by_account.total()
        if not self._has_room(peer, held, total):
            raise Busy(
                f"too many pending requests from {account} ({held}; {total} in total)",
                hint="end some of them: followed logs, for instance",
            )
        self._by_account[account] += 1
        self._anonymous += is_anonymous
        try:
            yield
        finally:
            self._anonymous -= is_anonymous
            self._by_account[account] -= 1
            if not self._by_account[account]:
                del self._by_account[account]

    def _has_room(self, peer: Peer, held: int, total: int) -> bool:
        if peer.is_trusted:  # its other connections stay free for commands
            return total < self._most and held < self._most // 4
        free = self._most - self._reserve - total
        if peer.role == ANYONE:
            free = min(free, self._most // 2 - self._anonymous)
        return held < -(-free // 4)  # rounded up: the last place goes to an account without one


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the server's computing time an account may take."""

    of_time: float
    burst_s: float
    """Seconds of computing time that it may use at once, after a pause."""


USERS = Share(0.2, 0.5)
UNPROVED = Share(0.05, 0.1)
ALL_UNPROVED = Share(0.3, 0.5)
"""Share of all anonymous callers together."""
MAX_PAUSE_S = 5.0
"""How long a request waits until its account's debt is paid; beyond that it is refused."""
_MAX_ACCOUNTS = 4096


class ComputeShares:
    """Charges accounts for computing time; an account above its share waits.

    Each account has a debt, which falls with time at the rate of its share. A request begins only
    while the debt is within the burst.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._debts: dict[str, tuple[float, float]] = {}
        """By account: seconds, and when that was."""

    async def wait_for_share(self, peer: Peer) -> None:
        """Wait until the caller's account may compute; raise `Busy` if that takes too long."""
        end = self._clock() + MAX_PAUSE_S
        while (pause_s := self.pause_s(peer)) > 0:
            if self._clock() + pause_s > end:
                raise Busy(
                    f"{peer.account} used more computing time than its share",
                    hint="send fewer requests, or smaller ones",
                )
            await asyncio.sleep(pause_s)

    def pause_s(self, peer: Peer) -> float:
        """Return how long until the caller's account is within its share; 0: it is."""
        over = [
            (self._debt(account, share) - share.burst_s) / share.of_time
            for account, share in _shares_of(peer)
        ]
        return max(0.0, *over) if over else 0.0

    def charge(self, peer: Peer, seconds: float) -> None:
        """Add the computing time of a request to the caller's debt."""
        for account, share in _shares_of(peer):
            debt = self._debt(account, share) + seconds
            self._debts.pop(account, None)
            self._debts[account] = debt, self._clock()
        while len(self._debts) > _MAX_ACCOUNTS:
            del self._debts[next(iter(self._debts))]  # the account charged longest ago

    def _debt(self, account: str, share: Share) -> float:
        debt, at = self._debts.get(account, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - at) * share.of_time)

    @coroutine
    def charged(self, peer: Peer, work: Awaitable[Answer]) -> Generator[Any, Any, Answer]:
        """Do the work, and charge the caller for each step that it takes on the event loop."""
        steps = work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            began = time.thread_time()
            try:
                future = step()
            except StopIteration as e:
                return e.value  # type: ignore[no-any-return]
            finally:
                self.charge(peer, time.thread_time() - began)
            try:
                value = yield future
                step = partial(steps.send, value)
            except BaseException as e:
                step = partial(steps.throw, e)


def _shares_of(peer: Peer) -> tuple[tuple[str, Share], ...]:
    if peer.is_trusted:
        return ()
    if peer.role == ANYONE:
        return (peer.account, UNPROVED), (ANYONE, ALL_UNPROVED)
    return ((peer.account, USERS),)


class AccountLocks:
    """Serializes the costly requests of each account."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, peer: Peer) -> asyncio.Lock:
        """Return the lock of a caller's account; it is freed with its last holder."""
        lock = self._locks.get(peer.account)
        if lock is None:
            self._locks[peer.account] = lock = asyncio.Lock()
        return lock
