"""The running agent, without the command line: it is loaded once and stays for months.

What is not loaded here no host has to hold (docs/adr/0114;
`tests/integration/agent/test_what_an_agent_loads.py`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.config import load
from wire.errors import TwineError
from wire.log import configure


def main() -> None:
    """Run the agent with the configuration of the host; every failure on purpose is one message."""
    try:
        serve(None)
    except KeyboardInterrupt:
        sys.exit(130)
    except TwineError as e:
        from agent.cli.program import fail

        fail(e)


def serve(config_path: Path | None) -> None:
    """Run the agent until it is stopped."""
    with _no_authorities():
        from agent import daemon
    gc.collect()
    gc.freeze()  # loaded modules stay: a collection need not visit them again

    config = load(config_path)
    configure("twine-agent", config.log_level)
    try:
        asyncio.run(daemon.serve(config))
    except BaseExceptionGroup as group:
        for error in group.exceptions:
            if isinstance(error, TwineError):
                raise error from group
        raise


@contextmanager
def _no_authorities() -> Iterator[None]:
    """Keep aiohttp from reading the host's authorities as it is loaded, which takes 2.3 MB.

    aiohttp makes an SSL context of them for `https://` calls that name no context. The agent
    always names its own (`wire.tls`), and a probe follows no redirect to another address.
    """
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = os.devnull
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before
