"""The verdict over silent machines, and the brake."""

from control_plane.core.health import BrakePolicy, Signs, Verdict, judge

POLICY = BrakePolicy(down_after_s=10, share=0.4, window_s=60, grace_s=300)


def region(*silent_s: float, of: int = 3) -> dict[str, Signs]:
    found = {f"m{i}": Signs(s) for i, s in enumerate(silent_s)}
    return found | {f"m{i}": Signs(0.5) for i in range(len(silent_s), of)}


def test_one_silent_machine_is_down():
    assert judge(region(10), POLICY) == Verdict(down=("m0",))
    assert judge(region(9.9), POLICY) == Verdict()


def test_one_machine_of_one_is_down():
    assert judge(region(10, of=1), POLICY).down == ("m0",)


def test_machines_cut_off_together_are_not_taken_for_one_after_another():  # F-51
    verdict = judge(region(10, 7.5), POLICY)
    assert verdict.down == ()
    assert verdict.suspect == ("m0",)
    assert "2 of 3 machines" in verdict.reason


def test_a_loss_shortly_after_another_brakes_too_and_a_late_one_does_not():
    assert judge(region(10) | {"m1": Signs(40, down_for_s=30)}, POLICY).down == ()
    assert judge(region(10) | {"m1": Signs(999, down_for_s=400)}, POLICY).down == ("m0",)


def test_a_loss_below_the_share_is_acted_on():
    assert judge(region(10, 10, of=10), POLICY).down == ("m0", "m1")
    assert judge(region(*[10] * 5, of=10), POLICY).down == ()


def test_the_brake_gives_way_after_the_grace():
    verdict = judge(region(300, 299), POLICY)
    assert (verdict.down, verdict.suspect) == (("m0",), ("m1",))


def test_a_machine_that_reboots_on_purpose_is_excused():  # HP1
    assert judge({"m0": Signs(100, excused=True), "m1": Signs(10)}, POLICY).down == ("m1",)
