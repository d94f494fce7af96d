"""The process of a front end: it serves users over TLS and calls the core for them.

It has no store, no key of the authority and no state. Its credential, a file, permits calls for
users; the configuration lists the possible cores.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from control_plane.config import Config
from control_plane.front_end.relay import FrontEndRelay
from control_plane.identity.from_file import FileIdentity
from control_plane.process import run_until, url_of, version
from control_plane.runtime.runtime import Runtime
from wire.listen import serving, tcp_socket
from wire.tls import FRONT_END

log = logging.getLogger(__name__)


async def serve_front_end(
    config: Config, stopping: asyncio.Event, started: Callable[[str], None]
) -> None:
    """Run a front end until `stopping` is set; calls `started` with its URL.

    Raises `ConfigError` if a setting cannot be used.
    """
    async with AsyncExitStack() as stack:
        name = FRONT_END.rpartition("/")[2]
        identity = FileIdentity(Path(config.front_end_credential), name)
        tcp = stack.enter_context(tcp_socket(*config.listen_on()))
        runtime = Runtime()
        relay = FrontEndRelay(config.cores, identity.core_context(), identity.cluster, runtime)
        stack.push_async_callback(relay.close)
        app, tls = relay.app(version()), identity.server_context()
        await stack.enter_async_context(serving(app, tcp, tls, None))
        url = url_of(config.reachable_at()[0], tcp.getsockname()[1])
        log.info("serving", extra={"url": url, "role": name})
        started(url)
        await run_until(
            stopping, relay.follow_core(), runtime.watch_clocks(), identity.reload_forever()
        )
        log.info("ending")
