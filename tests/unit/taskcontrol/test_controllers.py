"""The ready controllers: what each acknowledges, case by case."""

import pytest
from controller_requests import MONDAY, a_request, acked, an_update

from taskcontrol.api import AdvanceNotice
from taskcontrol.quorum import Quorum
from taskcontrol.shards import Sharded
from taskcontrol.stateless import Stateless
from taskcontrol.windows import Never, window
from wire.errors import InvalidInput

FIGURE_2 = {
    1: {"A", "C"},
    2: {"A", "B"},
    3: {"A", "D"},
    4: {"C"},
    5: {"B", "D"},
    6: {"B", "D"},
    7: {"C"},
}
"""Four shards of three replicas on tasks 1 to 7, so that the paper's statements about them hold."""


def updates(*tasks: int):
    return [an_update(task) for task in tasks]


# -- shards


@pytest.mark.behaviour("TC12")
def test_two_tasks_that_share_a_shard_never_go_together():
    """Figure 2: tasks 1 and 3 hold two replicas of A."""
    found = acked(Sharded().answer(a_request(8, *updates(*range(1, 8))), FIGURE_2))
    assert not {"t1", "t3"} <= set(found)
    shards = [shard for ack in found for shard in FIGURE_2[int(ack[1:])]]
    assert len(shards) == len(set(shards))
    assert found


@pytest.mark.behaviour("TC12")
def test_no_task_that_shares_a_shard_with_a_task_that_is_down_is_stopped():
    """Figure 2: the machine of task 4 failed, so tasks 1 and 7 must keep C alive."""
    found = acked(Sharded().answer(a_request(8, *updates(1, 7, 2), down=[4]), FIGURE_2))
    assert found == ["t2"]


def test_a_task_that_is_down_is_moved_at_once():
    move = an_update(4, kind="move", cause="failure")
    assert acked(Sharded().answer(a_request(8, move, down=[4]), FIGURE_2)) == ["t4"]


@pytest.mark.behaviour("TC12", "F-55")
@pytest.mark.parametrize(("indexes", "expected"), [([(1, 3), (5, 7)], ["t2"]), ([], ["t1", "t2"])])
def test_an_abandoned_task_counts_as_without_replicas_until_the_map_changes(indexes, expected):
    """Task 4 did not serve and no longer belongs to the job, so C has one replica less.

    A request that does not list the job's tasks (from an older control plane) is answered as
    before.
    """
    request = a_request(7, *updates(1, 2), indexes=indexes)
    shards = FIGURE_2 | {2: {"B"}, 4: {"C"}, 5: {"D"}, 6: {"D"}}
    assert acked(Sharded().answer(request, shards)) == expected


def a_notice(**fields):
    known = {"id": "n", "kind": "maintenance", "machine": "m4", "tasks": [4], "start": MONDAY}
    return AdvanceNotice(**known | fields)


@pytest.mark.behaviour("TC8", "TC9")
@pytest.mark.parametrize(
    ("notice", "instead", "expected"),
    [
        (a_notice(expected_duration_s=7200.0), ["stop"], ["t4"]),  # 1: move
        (a_notice(expected_duration_s=300.0), ["stop"], ["t4 as stop"]),  # 2: stop, start after
        (a_notice(expected_duration_s=180.0, tasks_survive=True), ["stop"], []),  # 3: stay
        (a_notice(), ["stop"], ["t4"]),
        (a_notice(expected_duration_s=300.0), [], ["t4"]),
        (a_notice(expected_duration_s=300.0, kind="decommission"), ["stop"], ["t4"]),
    ],
)
def test_a_maintenance_is_met_in_one_of_three_ways(notice, instead, expected):
    """While a switch is replaced within minutes, no task of a stateful service moves."""
    move = an_update(4, kind="move", cause="maintenance", notice="n", instead=instead)
    request = a_request(8, move, advance_notices=[notice])
    assert acked(Sharded(rebuild_s=1800).answer(request, FIGURE_2)) == expected


# -- quorum


@pytest.mark.behaviour("TC13")
def test_followers_go_first_one_by_one_and_the_leader_last():
    """An ensemble of three changes its leader once in a release, not three times."""
    left, order = [0, 1, 2], []
    while left:
        (ack,) = acked(Quorum().answer(a_request(3, *updates(*left)), leader=1))
        order.append(ack)
        left.remove(int(ack[1:]))
    assert order == ["t0", "t2", "t1"]


def test_no_member_is_stopped_if_the_majority_would_be_lost():
    assert acked(Quorum().answer(a_request(3, *updates(0, 1), down=[2]), leader=0)) == []
    assert acked(Quorum().answer(a_request(5, *updates(0, 1), down=[2]), leader=0)) == ["t1"]
    assert acked(Quorum(spare=1).answer(a_request(5, *updates(0, 1), down=[2]), 0)) == []


def test_no_member_is_stopped_while_there_is_no_leader():
    assert acked(Quorum().answer(a_request(3, *updates(0, 1, 2)), leader=None)) == []


def test_a_member_that_is_down_moves_only_while_a_majority_has_the_data():
    move = an_update(2, kind="move", cause="failure")
    assert acked(Quorum().answer(a_request(3, move, down=[2]), leader=0)) == ["t2"]
    assert acked(Quorum().answer(a_request(3, move, down=[1, 2]), leader=None)) == []


# -- stateless


@pytest.mark.behaviour("TC14")
@pytest.mark.parametrize(
    ("load", "down", "expected"),
    [(0.2, [], 5), (0.6, [], 5), (0.7, [], 2), (0.78, [], 1), (1.0, [], 1), (0.2, [18, 19], 3)],
)
def test_the_less_there_is_to_do_the_more_tasks_go_at_once(load, down, expected):
    """A release is slower at the peak, without any action of an operator."""
    request = a_request(20, *updates(*range(18)), down=down)
    assert len(acked(Stateless().answer(request, load))) == expected


def test_at_the_peak_a_release_may_wait_altogether():
    request = a_request(20, *updates(*range(20)))
    assert acked(Stateless(at_least=0).answer(request, 0.9)) == []


# -- windows


@pytest.mark.parametrize(
    ("text", "day", "hour", "expected"),
    [
        ("mon-fri 09:00-17:30", 0, 9, True),
        ("mon-fri 09:00-17:30", 5, 9, False),
        ("mon-fri 09:00-17:30", 4, 18, False),
        ("sat 22:00-06:00", 6, 5, True),
        ("sat 22:00-06:00", 5, 5, False),
        ("12:00-13:00", 6, 12, True),
        ("fri-mon 00:00-24:00", 6, 23, True),
    ],
)
def test_a_window_covers_the_times_that_it_names(text, day, hour, expected):
    never = Never.of([text])
    assert never.is_now(MONDAY + day * 86_400 + hour * 3600) is expected


def test_hours_are_those_of_the_place():
    never = Never.of(["mon 09:00-10:00"], "Europe/Berlin")
    assert never.is_now(MONDAY + 8 * 3600 + 60)
    assert not never.is_now(MONDAY + 9 * 3600 + 60)


@pytest.mark.parametrize(
    "text",
    ["", "monday 9-10", "mon 09:00", "mon 09:00-09:00", "mon 25:00-26:00", "abc 01:00-02:00"],
)
def test_an_invalid_window_is_refused_with_an_example(text):
    with pytest.raises(InvalidInput) as caught:
        window(text)
    assert "mon-fri 09:00-17:30" in caught.value.hint


def test_in_a_window_only_down_machines_are_considered():
    never = Never.of(["00:00-24:00"])
    left = never.left(a_request(3, *updates(0, 1), down=[1]))
    assert [o.task for o in left.request] == [1]


# -- against fixed update domains


SHARDS = {task: {f"s{(task - n) % 9}" for n in range(0, 9, 3)} for task in range(9)}
"""Nine shards with one replica in each of three domains: 0-2, 3-5, 6-8."""
DOMAINS = ([0, 1, 2], [3, 4, 5], [6, 7, 8])


def lost(down: set[int]) -> set[str]:
    """Return the shards with two or more replicas down."""
    away = [shard for task in down for shard in SHARDS[task]]
    return {shard for shard in away if away.count(shard) > 1}


@pytest.mark.behaviour("WH7")
def test_fixed_update_domains_lose_a_shard_where_a_controller_does_not():
    """A machine fails in the middle of a release, in a domain that is not being updated."""
    failed = 4
    assert not any(lost(set(domain)) for domain in DOMAINS)  # each domain alone is safe
    assert lost({failed} | set(DOMAINS[0]))  # but not while another task is down
    outdated, rounds = set(range(9)) - {failed}, 0
    while outdated and rounds < 20:
        rounds += 1
        request = a_request(9, *updates(*sorted(outdated)), down=[failed])
        going = {int(ack[1:]) for ack in acked(Sharded().answer(request, SHARDS))}
        assert not lost({failed} | going)
        if not going:
            break
        outdated -= going
    assert outdated == {1, 7}  # both share shards with the failed task, and wait for it
    request = a_request(9, *updates(1, 7))
    assert len(acked(Sharded().answer(request, SHARDS))) == 1
