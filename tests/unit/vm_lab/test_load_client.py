"""Which rates the load client accepts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from vm_lab.load_client import LoadClient, LoadOutcome, main

URL = ("--url", "http://127.0.0.1:1")


@pytest.fixture
def waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_the_end(_: LoadClient, until) -> LoadOutcome:
        await until.wait()
        return LoadOutcome()

    monkeypatch.setattr(LoadClient, "run", until_the_end)


@pytest.mark.behaviour("BUG-LB17")
@pytest.mark.usefixtures("waits_for_the_end")
@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "many"])
def test_a_rate_that_cannot_be_used_ends_the_client_with_its_reason(rate: str) -> None:
    """Formerly NaN was accepted, and a wrong line left the client running without end."""
    for words, text in (((*URL, f"--rate={rate}"), ""), (URL, f"2\n{rate}\n")):
        result = CliRunner().invoke(main, words, input=text)
        assert result.exit_code == 2
        assert f"'{rate}' is no rate from 0.1 to 1000 requests per second" in result.output


@pytest.mark.usefixtures("waits_for_the_end")
def test_a_client_ends_with_its_input() -> None:
    result = CliRunner().invoke(main, URL, input="2\n0.1\n")
    assert (result.exit_code, '"requests":0' in result.output) == (0, True)
