"""Runs the agent without loading the command line, which saves memory on every host.

The agent runs for months (docs/adr/0114; `tests/integration/agent/test_agent_imports.py`).
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
    """Run the agent with the host's configuration; a `TwineError` becomes one message."""
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
    gc.freeze()  # loaded modules stay, so collections need not visit them

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
    """Keep aiohttp from reading the host's authorities during import, which takes 2.3 MB.

    aiohttp makes an SSL context of them for `https://` calls without a context. The agent always
    passes its own (`wire.tls`), and a probe follows no redirect to another address.
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
