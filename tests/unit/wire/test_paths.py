"""Paths of calls, built from a caller's values."""

import pytest

from wire.errors import InvalidInput
from wire.routes import Route

ROUTE = Route(name="show", method="GET", path="/v1/jobs/{job}/tasks/{index}")


@pytest.mark.behaviour("BUG-UX64")
@pytest.mark.parametrize("value", ["", ".", ".."])
def test_a_value_that_a_client_would_drop_from_the_path_is_refused(value: str) -> None:
    """Formerly `job status ''` reported that there is no /v1/jobs/ here, and `..` requested
    /v1/."""
    with pytest.raises(InvalidInput, match=f"'{value}' cannot be used as job"):
        ROUTE.url(job=value, index=0)


def test_other_values_are_quoted() -> None:
    assert ROUTE.url(job="../a b", index=0) == "/v1/jobs/..%2Fa%20b/tasks/0"
