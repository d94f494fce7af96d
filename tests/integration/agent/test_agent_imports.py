"""The long-running agent loads neither the command line nor the system's CA certificates."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import asyncio, json, ssl, sys
from agent.cli import serving

def run(work):
    work.close()

asyncio.run = run
serving.load = lambda path: type("Config", (), {"log_level": "info"})
serving.configure = lambda *words: None
serving.serve(None)
from aiohttp.connector import _SSL_CONTEXT_VERIFIED
print(json.dumps([sorted(sys.modules), _SSL_CONTEXT_VERIFIED.cert_store_stats()["x509"]]))
"""
RARE = {"click", "rich", "tarfile", "cryptography", "pyroute2", "sqlite3", "agent.cli.root"}


def test_a_running_agent_loads_permanently_needed_modules() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    loaded, authorities = json.loads(ran.stdout)

    assert "aiohttp.web" in loaded
    assert RARE & set(loaded) == set()
    assert authorities == 0
