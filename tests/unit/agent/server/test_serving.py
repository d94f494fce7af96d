"""`twine-agent serve` as systemd calls it: without the command line, with sd_notify messages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agent.cli import main, serving
from wire.errors import ConfigError


def test_a_failure_on_purpose_is_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(config_path: Path | None) -> None:
        assert config_path is None
        raise ConfigError("cannot use it", hint="look at it")

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["twine-agent", "serve"])
    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 78
    assert capsys.readouterr().err == "twine-agent: cannot use it\n  try: look at it\n"


@pytest.mark.parametrize("before", [None, "/etc/ssl/own.pem"])
def test_the_hosts_authorities_are_left_out_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if before is not None:
        monkeypatch.setenv("SSL_CERT_FILE", before)
    with serving._no_authorities():
        assert os.environ["SSL_CERT_FILE"] == os.devnull
    assert os.environ.get("SSL_CERT_FILE") == before
