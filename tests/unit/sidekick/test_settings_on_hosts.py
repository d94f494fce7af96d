"""Every kind of setting on every kind of host: planned, applied, verified, undone exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import RecordedHost

from sidekick.apply import ApplyRun
from sidekick.expression import Facts
from sidekick.facts import read_facts
from sidekick.profile import Library, Profile
from sidekick.record import Target
from sidekick.report import ApplyOutcome, Disruption, SettingChange, WantedSetting
from sidekick.setting import Setting
from sidekick.settings import SETTINGS, setting_of, settings_of
from sidekick.settings.affinity import divide
from sidekick.targets import target_of
from wire.errors import KernelFileError

GUEST = {"turbo", "power", "cstates", "smt", "prefetch", "services", "affinity"}
UNABLE = {
    "amd": {"prefetch"},
    "vm": GUEST | {"modules", "controllers"},
}
"""The sections that a host does not support."""
SECTIONS = {
    "affinity": "[affinity]\nnic_irq_threads=12\nbusy_loop_threads=1\n",
    "block": "[block]\nflash={scheduler='mq-deadline', nr_requests=128, read_ahead_kb=16}\n"
    "rotating={scheduler='none', rq_affinity=2, wbt_lat_usec=0}\n",
    "bpf": "[bpf]\nstats=true\nmax_sample_rate=5000\nmax_cpu_percent=5\njit=false\n"
    "maps={'sampler/config:0'=50, 'sampler/config:2'=1, 'no/such:0'=1}\n",
    "controllers": "[controllers]\ndisable=['cpu', 'io']\n",
    "cstates": "[cstates]\nmax_latency_us=2\n",
    "modules": "[modules]\nload=['tcp_bbr', 'tcp_cubic', 'no_such']\n",
    "mounts": "[mounts]\n'/data'={atime='noatime', lazytime='on', commit=60}\n"
    "'/nosuch'={atime='noatime'}\n",
    "nic": "[nic]\nqueues='max'\nrx_ring=2048\ntx_ring=512\ntx_checksum='off'\ngso='off'\n"
    "adaptive_rx='off'\nrx_usecs=50\nlro='off'\nrxhash='on'\n",
    "power": "[power]\ngovernor=['performance']\nenergy_preference=['performance']\n",
    "prefetch": "[prefetch]\nl2_adjacent='off'\nl1_stream='off'\nl1_region='on'\n",
    "services": "[services]\nstopped=['irqbalance.service', 'nosuch.service']\n",
    "smt": "[smt]\nmode='off'\n",
    "thp": "[thp]\nenabled='madvise'\ndefrag='defer'\nkhugepaged_max_ptes_none=0\n",
    "turbo": "[turbo]\nmode='off'\n",
}


def a_profile(tmp_path: Path, text: str, facts: Facts) -> Profile:
    folder = tmp_path / "profiles"
    folder.mkdir(exist_ok=True)
    (folder / "p.toml").write_text(f"description='p'\n{text}")
    return Library([folder], SETTINGS).load("p", facts)


def wanted_of(fake: RecordedHost, kind: str, text: str = "") -> tuple[Setting, list[WantedSetting]]:
    profile = a_profile(fake.root.parent, text or SECTIONS[kind], read_facts(fake.fs))
    setting = SETTINGS[kind]
    assert setting.check(profile) == []
    return setting, setting.wanted(profile, fake.host())


def applied(
    fake: RecordedHost, setting: Setting, wanted: list[WantedSetting]
) -> list[SettingChange]:
    observed = setting.observe(fake.host(), [w.setting for w in wanted])
    able = [w for w in wanted if observed[w.setting] is not None]
    changes = setting.plan(able, observed, {})
    for change in changes:
        made = setting.apply(fake.host(), change)
        assert made.outcome is ApplyOutcome.APPLIED, (change, made)
    return changes


@pytest.fixture
def fake(tmp_path: Path, request: pytest.FixtureRequest) -> RecordedHost:
    return RecordedHost(tmp_path / "host", getattr(request, "param", "intel"))


on_every_host = pytest.mark.parametrize("fake", ["amd", "intel", "vm"], indirect=True)


def test_every_kind_has_an_example_here() -> None:
    others = {"sysctl", "hugepages", "kernel", "scratch"}  # other tests cover these
    assert set(SETTINGS) - others == SECTIONS.keys()


@on_every_host
@pytest.mark.parametrize("kind", SECTIONS)
def test_an_applied_profile_is_read_back_and_undone_exactly(fake: RecordedHost, kind: str) -> None:
    before = fake.everything()
    setting, wanted = wanted_of(fake, kind)
    names = [w.setting for w in wanted]
    originals = setting.observe(fake.host(), names)
    changes = applied(fake, setting, wanted)
    able = [w for w in wanted if originals[w.setting] is not None]
    assert bool(changes) is (kind not in UNABLE.get(fake.name, set()))
    assert bool(changes) is (fake.everything() != before)
    now = setting.observe(fake.host(), names)
    assert setting.plan(able, now, originals) == [], "the same again writes nothing"
    for each in wanted:
        expected = ApplyOutcome.APPLIED if each in able else ApplyOutcome.UNSUPPORTED
        report = setting.verify(each, now)
        assert report.outcome is expected
        assert bool(report.detail) is (expected is ApplyOutcome.UNSUPPORTED)
    for change in reversed(changes):
        setting.undo(fake.host(), change)
    back = setting.plan([], setting.observe(fake.host(), originals), originals)
    for change in back:
        setting.apply(fake.host(), change)
    assert fake.everything() == before


@pytest.mark.behaviour("BUG-SK45")
def test_an_energy_preference_is_restored_after_its_governor(fake: RecordedHost) -> None:
    """With the governor `performance` the kernel refuses every other preference.

    The kernel does not restore the earlier preference itself.
    """
    policies = {f"/sys/devices/system/cpu/cpufreq/policy{number}" for number in range(36)}
    for text in (SECTIONS["power"], "[power]\ngovernor='performance'\n"):
        before = fake.everything()
        profile = a_profile(fake.root.parent, text, read_facts(fake.fs))
        for target in (target_of(profile, fake.host()), Target()):
            report = ApplyRun(fake.host(), fake.state, target).carry_out()
            wanted = "performance" if target.name else "balance_performance"
            files = {f"{policy}/energy_performance_preference" for policy in policies}
            assert {fake.fs.read(file) for file in files} == {wanted}, report
        assert fake.everything() == before


@pytest.mark.behaviour("F-70")
def test_turbo_is_one_switch_for_all_makes(tmp_path: Path) -> None:
    switches = {
        "intel": "/sys/devices/system/cpu/intel_pstate/no_turbo",
        "amd": "/sys/devices/system/cpu/cpufreq/boost",
    }
    for name, off in (("intel", "1"), ("amd", "0")):
        fake = RecordedHost(tmp_path / name, name)
        applied(fake, *wanted_of(fake, "turbo"))
        assert fake.fs.read(switches[name]) == off


def test_turbo_by_policy_is_restored_policy_by_policy(fake: RecordedHost) -> None:
    fake.fs.path("/sys/devices/system/cpu/intel_pstate/no_turbo").unlink()
    for policy in range(36):
        path = f"/sys/devices/system/cpu/cpufreq/policy{policy}/boost"
        fake.fs.path(path).write_text("0\n" if policy == 7 else "1\n")
    before = fake.everything()
    setting, wanted = wanted_of(fake, "turbo")
    assert setting.read(fake.host(), "turbo.mode") == "0-6,8-35=on 7=off"
    (change,) = applied(fake, setting, wanted)
    setting.undo(fake.host(), change)
    assert fake.everything() == before


@pytest.mark.behaviour("F-70")
@pytest.mark.parametrize("fake", ["intel-no-turbo"], indirect=True)
def test_firmware_that_forbids_turbo_is_no_failure(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "turbo", "[turbo]\nmode='on'\n")
    with pytest.raises(KernelFileError, match="Operation not permitted"):
        setting.write(fake.host(), "turbo.mode", "on")
    report = setting.verify(wanted[0], setting.observe(fake.host(), ["turbo.mode"]))
    assert (report.outcome, wanted[0].required) == (ApplyOutcome.UNSUPPORTED, False)
    assert "firmware forbids it" in report.detail


@pytest.mark.parametrize("fake", ["amd"], indirect=True)
def test_governors_that_differ_are_given_back_each(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "power")
    governor = wanted[0]
    assert setting.read(fake.host(), governor.setting) == "0-11=schedutil 12-15=ondemand"
    assert applied(fake, setting, wanted)[0].before == "0-11=schedutil 12-15=ondemand"
    assert setting.read(fake.host(), governor.setting) == "performance"


def test_the_first_governor_that_a_host_offers_is_taken(tmp_path: Path) -> None:
    text = "[power]\ngovernor=['schedutil', 'powersave']\n"
    found = {}
    for name in ("intel", "amd"):
        fake = RecordedHost(tmp_path / name, name)
        found[name] = [(w.setting, w.value) for w in wanted_of(fake, "power", text)[1]]
    assert found == {
        "intel": [("power.governor", "powersave")],
        "amd": [("power.governor", "schedutil")],
    }


def test_a_governor_that_no_host_offers_is_reported(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "power", "[power]\ngovernor='turbo'\nrequired=true\n")
    assert wanted[0].required
    report = setting.verify(wanted[0], setting.observe(fake.host(), [wanted[0].setting]))
    assert report.detail == "its frequency driver does not offer governor turbo"


def test_idle_states_are_bounded_by_what_they_cost(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "cstates")
    assert [w.value for w in wanted] == ["2:0-35 3:0-35"]
    applied(fake, setting, wanted)
    states = "/sys/devices/system/cpu/cpu5/cpuidle"
    found = [fake.fs.read(f"{states}/state{n}/disable") for n in range(4)]
    assert found == ["0", "0", "1", "1"]


@pytest.mark.behaviour("HP7")
def test_memcache_hosts_get_the_settings_of_the_paper(fake: RecordedHost) -> None:
    parts = divide(fake.host(), 12, 1)
    assert parts
    assert [len(p) for p in (parts.irqs, parts.busy, parts.workers)] == [12, 1, 23]
    assert parts.irqs == (0, 18, 1, 19, 2, 20, 3, 21, 4, 22, 5, 23), "whole cores first"
    applied(fake, *wanted_of(fake, "affinity"))
    assert fake.fs.read("/proc/irq/60/smp_affinity_list") == "0-5,18-23"
    assert fake.fs.read("/proc/irq/9/smp_affinity_list") == "0-35", "not the network's"
    assert fake.fs.read("/sys/fs/cgroup/workload.slice/cpuset.cpus") == "6-17,24-35"
    environment = fake.fs.read("/run/twine/processors")
    assert environment == "irqs=0-5,18-23 busy=6 workers=7-17,24-35"


@pytest.mark.behaviour("BUG-SK29")
def test_interrupts_that_come_later_stay_off_the_processors_of_tasks(fake: RecordedHost) -> None:
    """A driver that is reset requests new interrupts, which get the kernel's default."""
    mask = fake.fs.path("/proc/irq/default_smp_affinity")
    mask.write_text("f,ffffffff\n")
    setting, wanted = wanted_of(fake, "affinity")
    (report,) = [r for r in applied(fake, setting, wanted) if r.setting == "affinity.new_irqs"]
    assert (report.before, report.after) == ("0-35", "0-5,18-23")
    assert int(mask.read_text().replace(",", ""), 16) == 0x3F | 0x3F << 18
    setting.write(fake.host(), "affinity.new_irqs", "0-35")
    assert mask.read_text().strip() == "0000000f,ffffffff", "given back, 36 processors"


@pytest.mark.parametrize("fake", ["two-nodes"], indirect=True)
def test_interrupts_stay_next_to_their_interface(fake: RecordedHost) -> None:
    parts = divide(fake.host(), 12, 1)
    assert parts
    assert set(parts.irqs) <= {*range(9, 18), *range(27, 36)}


@pytest.mark.parametrize("fake", ["debian-12"], indirect=True)
def test_a_host_with_too_few_processors_is_not_divided(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "affinity")
    reports = [setting.verify(w, setting.observe(fake.host(), [w.setting])) for w in wanted]
    assert {r.detail for r in reports} == {"this host has too few processors to divide them so"}


def test_prefetchers_are_bits_and_the_others_stay(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "prefetch")
    applied(fake, setting, wanted)
    data = fake.fs.path("/dev/cpu/35/msr").read_bytes()
    assert int.from_bytes(data[0x1A4 : 0x1A4 + 8], "little") == 0b0110
    unable = setting.observe(fake.host(), ["prefetch.l1_region"])
    assert unable == {"prefetch.l1_region": None}, "AMD's alone"


def test_a_processor_whose_register_is_not_known_is_left_alone(fake: RecordedHost) -> None:
    cpuinfo = fake.fs.path("/proc/cpuinfo")
    cpuinfo.write_text(cpuinfo.read_text().replace("106", "23"))
    setting, wanted = wanted_of(fake, "prefetch")
    assert applied(fake, setting, wanted) == []


def test_interfaces_get_what_their_driver_can(fake: RecordedHost) -> None:
    text = "[nic]\nqueues='max'\nrx_ring=8192\ntx_ring=9000\n"
    setting, wanted = wanted_of(fake, "nic", text)
    assert {w.setting: w.value for w in wanted} == {
        "nic.eth0.queues": "36",
        "nic.eth0.rx_ring": "8192",
        "nic.eth0.tx_ring:9000": "9000",
    }
    assert setting.why_missing(wanted[-1].setting) == (
        "9000 is more than the driver of eth0 takes for tx_ring"
    )
    assert setting.needs("nic.eth0.queues") is Disruption.DRAIN
    assert setting.needs("nic.eth0.gro") is Disruption.LIVE


def test_a_scheduler_changes_the_depth_of_its_queue_and_undo_restores_it(
    fake: RecordedHost,
) -> None:
    before = fake.everything()
    setting, wanted = wanted_of(fake, "block", "[block]\nflash={scheduler='mq-deadline'}\n")
    names = ["block.nvme0n1.scheduler"]
    originals = setting.observe(fake.host(), names)
    assert originals == {
        "block.nvme0n1.scheduler": "none",
        "block.nvme0n1.nr_requests": "1023",
    }
    applied(fake, setting, wanted)
    assert fake.fs.read("/sys/block/nvme0n1/queue/nr_requests") == "64"
    now = setting.observe(fake.host(), originals)
    assert setting.plan(wanted, now, originals) == []
    for change in setting.plan([], now, originals):
        setting.apply(fake.host(), change)
    assert fake.everything() == before


@pytest.mark.parametrize("depth", ["1023", "64", "512"])
def test_a_queue_depth_is_restored_with_its_scheduler(fake: RecordedHost, depth: str) -> None:
    fake.fs.path("/sys/block/nvme0n1/queue/nr_requests").write_text(f"{depth}\n")
    before = fake.everything()
    setting, wanted = wanted_of(fake, "block", "[block]\nflash={scheduler='mq-deadline'}\n")
    originals = setting.observe(fake.host(), [w.setting for w in wanted])
    changes = applied(fake, setting, wanted)
    for change in reversed(changes):
        setting.undo(fake.host(), change)
    assert fake.everything() == before, "undone at once"
    applied(fake, setting, wanted)
    for change in setting.plan([], setting.observe(fake.host(), originals), originals):
        setting.apply(fake.host(), change)
    assert fake.everything() == before, "released later"


def test_segmentation_is_restored_with_its_checksums(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "nic", "[nic]\ntx_checksum='off'\n")
    before = fake.everything()
    originals = setting.observe(fake.host(), [w.setting for w in wanted])
    changes = applied(fake, setting, wanted)
    assert setting.read(fake.host(), "nic.eth0.tso") == "off", "as a driver does it"
    for change in reversed(changes):
        setting.undo(fake.host(), change)
    assert fake.everything() == before
    applied(fake, setting, wanted)
    back = setting.plan([], setting.observe(fake.host(), originals), originals)
    assert [c.setting.rpartition(".")[2] for c in back] == [
        "tx_checksum",
        "scatter_gather",
        "tso",
        "gso",
    ]
    for change in back:
        setting.apply(fake.host(), change)
    assert fake.everything() == before


def test_a_scheduler_that_a_disk_does_not_offer_is_reported(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "block", "[block]\nrotating={scheduler='bfq'}\n")
    assert [w.setting for w in wanted] == ["block.sda.scheduler:bfq"]
    assert setting.read(fake.host(), wanted[0].setting) is None
    assert setting.why_missing(wanted[0].setting) == "/sys/block/sda/queue/scheduler offers no bfq"


def test_memory_and_pids_are_never_switched_off(fake: RecordedHost, tmp_path: Path) -> None:
    for controller in ("memory", "pids"):
        with pytest.raises(Exception, match="has 1 error"):
            a_profile(tmp_path, f"[controllers]\ndisable=['{controller}']\n", read_facts(fake.fs))


def test_a_controller_that_systemd_enables_again_is_not_off(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "controllers")
    applied(fake, setting, wanted)
    assert setting.read(fake.host(), "controllers.disabled") == "cpu io"
    control = "/sys/fs/cgroup/workload.slice/cgroup.subtree_control"
    fake.fs.write(control, "+cpu")
    observed = setting.observe(fake.host(), ["controllers.disabled"])
    assert setting.verify(wanted[0], observed).outcome is ApplyOutcome.DRIFTED


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("[services]\nstopped=['ssh.service']\n", "services"),
        ("[services]\nstopped=['twine-agent.service']\n", "services"),
        ("[services]\nstopped=['a.service']\nrunning=['a.service']\n", "services"),
        ("[modules]\nload=['netconsole']\n", "modules.load"),
        ("[power]\ngovernor=['performance', 'a/../b']\n", "power.governor"),
        ("[power]\ngovernor=[]\n", "power.governor"),
    ],
)
def test_keys_foreign_to_profiles_are_refused_by_name(
    fake: RecordedHost, tmp_path: Path, section: str, field: str
) -> None:
    profile = a_profile(tmp_path, section, read_facts(fake.fs))
    errors = [e for s in settings_of(profile.sections) for e in s.check(profile)]
    assert [e.field for e in errors] == [field]


def test_a_name_belongs_to_its_kind() -> None:
    assert {kind: setting_of(f"{kind}.x").kind for kind in SECTIONS} == {k: k for k in SECTIONS}


@pytest.mark.parametrize("fake", ["vm"], indirect=True)
def test_a_guests_card_that_cannot_delay_interrupts_is_unsupported(fake: RecordedHost) -> None:
    """Seen on a guest: the structure has the fields, but the kernel refuses another number."""
    setting, wanted = wanted_of(fake, "nic", "[nic]\nrx_usecs=16\nrx_frames=1\ntx_usecs=0\n")
    found = {w.setting: setting.read(fake.host(), w.setting) for w in wanted}
    assert found == {
        "nic.eth0.rx_usecs:16": None,
        "nic.eth0.rx_frames": "1",
        "nic.eth0.tx_usecs": "0",
    }
    assert "more than the driver of eth0 takes" in setting.why_missing("nic.eth0.rx_usecs:16")


@pytest.mark.behaviour("HP7")
def test_a_map_is_named_by_where_it_is_pinned(fake: RecordedHost) -> None:
    setting, wanted = wanted_of(fake, "bpf", "[bpf]\nmaps={'sampler/config:1'=9}\n")
    assert [(w.setting, w.value) for w in wanted] == [("bpf.maps.sampler/config:1", "9")]
    applied(fake, setting, wanted)
    assert fake.fs.read("/run/recorded/bpf/sampler/config").splitlines() == ["0 100", "1 9"]


@pytest.mark.parametrize(
    "place", ["../../etc/x:0", "/a:0", "a", "a:x", "a:-1", "a b:0", "a/../b:0"]
)
def test_a_place_that_is_no_map_and_key_is_refused(tmp_path: Path, place: str) -> None:
    profile = a_profile(tmp_path, f"[bpf]\nmaps={{'{place}'=1}}\n", {})
    assert ["MAP:KEY" in e.reason for e in setting_of("bpf").check(profile)] == [True]
