"""Both programs keep to their own OpenAPI documents, and no request made from them is a 5xx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from typing import Any

import aiohttp
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode

from .target_process import Target

WAITS = ("wait_s", "follow")
"""Parameters for waiting: programs obey them, which would make the test slow."""
EXAMPLES = 3
"""Number of requests per operation and kind of data; more by hand."""


async def _send(target: Target, requests: list[tuple[str, str, Any, dict[str, str]]]) -> list[Any]:
    found = []
    connector = aiohttp.UnixConnector(path=str(target.socket))
    async with aiohttp.ClientSession(connector=connector) as session:
        for method, path, body, query in requests:
            url = aiohttp.client.URL.build(scheme="http", host="x", path=path, query=query)
            async with session.request(method, url, data=body) as answer:
                data = await answer.read()
                found.append((answer.status, answer.content_type, data))
    return found


def _fetched(target: Target, path: str) -> bytes:
    ((status, _, data),) = asyncio.run(_send(target, [("GET", path, None, {})]))
    assert status == 200
    assert isinstance(data, bytes)
    return data


def _cases(operation: Any, mode: GenerationMode) -> list[Any]:
    """Return requests that the document allows, or that it forbids (none where all is allowed)."""
    cases: list[Any] = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        cases.append(case)

    with contextlib.suppress(HypothesisException):
        collect()
    return cases


def _request(case: Any) -> tuple[str, str, Any, dict[str, str]]:
    query = {k: str(v) for k, v in (case.query or {}).items() if k not in WAITS}
    body = case.body
    if isinstance(body, NotSet):
        data = None
    else:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return case.method, case.formatted_path, data, query


def test_no_request_made_from_the_document_is_a_5xx(target: Target) -> None:
    """Requests that the document allows, and requests that it forbids."""
    document = json.loads(_fetched(target, "/openapi.json"))
    schema = schemathesis.openapi.from_dict(document)
    wrong: list[Any] = []
    sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = _cases(operation, mode)
            requests = [_request(case) for case in cases]
            for request, (status, kind, data) in zip(
                requests, asyncio.run(_send(target, requests)), strict=True
            ):
                sent += 1
                if status >= 500 and status != 503:
                    wrong.append((operation.label, request, status, data[:300]))
                if status >= 400 and kind != "application/problem+json":
                    wrong.append((operation.label, request, status, kind))
    assert wrong == []
    assert sent > 40


def test_the_metrics_have_the_format_of_a_scraper(target: Target) -> None:
    """promtool (Debian package prometheus) reports nothing about names, units and help."""
    metrics = _fetched(target, "/metrics")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
