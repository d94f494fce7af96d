"""systemd client whose `listen` never blocks, so that an agent starts even if D-Bus hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from agent.machine import UnitListener
from agent.machine.systemd import HostSystemd
from wire.errors import SystemdError

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause between attempts to listen on a bus that does not answer."""


class PatientSystemd(HostSystemd):
    """Units of the host; `listen` does not wait."""

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes as soon as possible; returns a function that ends this.

        The first call is with "", when listening begins: anything may have changed before.
        """
        over = threading.Event()
        ends = list[Callable[[], None]]()

        def begin() -> None:
            while not over.is_set():
                try:
                    ends.append(super(PatientSystemd, self).listen(listener))
                except SystemdError as e:
                    log.warning("cannot subscribe to systemd yet", extra={"why": str(e)})
                    over.wait(RETRY_S)
                else:
                    break
            if over.is_set():
                end()
            else:
                listener("")

        def end() -> None:
            over.set()
            while ends:
                ends.pop()()

        threading.Thread(target=begin, name="systemd-listen", daemon=True).start()
        return end
