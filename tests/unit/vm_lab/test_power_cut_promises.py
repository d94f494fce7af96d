"""What an agent promised, and which promises a host keeps after a power cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vm_lab.errors import LabError
from vm_lab.guest_requests import Order, OrderResult
from vm_lab.power_cuts import Cut, CutSeries, saved_series, table
from vm_lab.promises import LabPromises


def record_request(
    promises: LabPromises, number: int, what: str, answer: str | None = "", **more
) -> None:
    """Give an order. `answer` is its error, "" for success, or None for no answer."""
    promises.order_sent(Order(number=number, what=what, **more))
    if answer is not None:
        promises.answer_received(
            OrderResult(number=number, error=answer, digest=more.get("name", ""))
        )


def seen(*images: str, **tasks: tuple[int, str]) -> OrderResult:
    return OrderResult(number=0, tasks=dict(tasks), images=list(images))


def test_an_acknowledged_task_must_run_in_its_generation() -> None:
    promises = LabPromises()
    record_request(promises, 1, "task", name="t", generation=3)
    assert promises.broken(seen(t=(3, "running"))) == []
    assert promises.broken(seen(t=(3, "starting"))) == ["task t is starting"]
    assert promises.broken(seen(t=(2, "running"))) == ["task t has generation 2, not 3"]
    assert promises.broken(seen()) == ["task t has generation 0, not 3"]


@pytest.mark.parametrize("generation", [3, 4])
def test_an_unanswered_order_has_an_unknown_outcome(generation: int) -> None:
    promises = LabPromises()
    record_request(promises, 1, "task", name="t", generation=3)
    record_request(promises, 2, "task", None, name="t", generation=4)
    assert promises.broken(seen(t=(generation, "running"))) == []
    assert promises.broken(seen(t=(5, "running"))) != []


def test_a_removed_task_does_not_return_and_a_refusal_promises_nothing() -> None:
    promises = LabPromises()
    record_request(promises, 1, "task", name="t", generation=3)
    record_request(promises, 2, "no-task", name="t", generation=4)
    record_request(promises, 3, "task", "busy", name="t", generation=5)
    assert promises.broken(seen()) == []
    assert promises.broken(seen(t=(3, "running"))) == ["task t has generation 3, not 0"]
    assert promises.acknowledged == 2


def test_published_images_remain_and_removed_images_stay_removed() -> None:
    promises = LabPromises()
    record_request(promises, 1, "image", name="sha256:a")
    assert promises.broken(seen()) == ["image sha256:a is gone"]
    record_request(promises, 2, "no-image", None, image="sha256:a")
    assert promises.broken(seen()) == []
    promises.answer_received(OrderResult(number=2))
    assert promises.broken(seen("sha256:a")) == ["image sha256:a is back"]


def test_after_a_cut_the_state_of_the_host_is_promised() -> None:
    promises = LabPromises()
    record_request(promises, 1, "task", None, name="t", generation=3)
    renewed = promises.renewed(seen("sha256:b", t=(3, "running")))
    assert (renewed.tasks, renewed.images, renewed.open) == ({"t": 3}, {"sha256:b": True}, {})


def test_the_table_counts_cuts_and_orders() -> None:
    cut = Cut(number=1, after_s=2.5, acknowledged=7, open=["task t"], boot_s=20, rest_s=3, wrong=[])
    output = table(CutSeries(seed=4, cuts=[cut]))
    assert "| 1 | 2.5 s | 7 | task t | 20 s | 3 s | as promised, fsck clean |" in output
    assert "1 cuts (seed 4), 1 clean; 7 orders acknowledged before them, 1 under way." in output


def test_a_series_of_cuts_continues_only_with_its_seed(tmp_path: Path) -> None:
    file = tmp_path / "power-cuts.json"
    assert saved_series(file, 1) == CutSeries(seed=1)
    cut = Cut(number=1, after_s=1, acknowledged=2, open=[], boot_s=3, rest_s=4, wrong=[])
    file.write_bytes(msgspec.json.encode(CutSeries(seed=1, cuts=[cut])))
    assert saved_series(file, 1).cuts == [cut]
    assert saved_series(file, 2).cuts == []


@pytest.mark.behaviour("BUG-LB12")
def test_a_damaged_series_of_cuts_is_one_error(tmp_path: Path) -> None:
    """Formerly it was a traceback."""
    file = tmp_path / "power-cuts.json"
    file.write_bytes(b"")
    with pytest.raises(LabError, match=r"cannot use .*power-cuts\.json") as error:
        saved_series(file, 1)
    assert "new series" in error.value.hint
