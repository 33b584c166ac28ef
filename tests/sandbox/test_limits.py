from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.task import Environment
from posttrain.sandbox.cgroups import CgroupPlace, cgroup_places, memory_limit
from posttrain.sandbox.command import Clip
from posttrain.sandbox.spec import process_limits


def clipped(*pieces: bytes, cap: int) -> Clip:
    clip = Clip(cap)
    for piece in pieces:
        clip.feed(piece)
    return clip


def test_output_up_to_the_cap_is_whole():
    for size in (9_999, 10_000):
        clip = clipped(b"x" * size, cap=10_000)
        assert (clip.truncated, clip.text()) == (False, "x" * size)


def test_output_over_the_cap_says_what_is_left_out():
    clip = clipped(b"a" * 5_000, b"-", b"b" * 5_000, cap=10_000)
    assert clip.truncated
    assert clip.text() == "a" * 5000 + "\n[... 1 of 10001 bytes left out ...]\n" + "b" * 5000


def test_a_character_cut_in_two_leaves_no_replacement():
    clip = clipped("é".encode() * 10, cap=6)
    assert clip.text() == "é\n[... 14 of 20 bytes left out ...]\né"


def test_invalid_bytes_are_replaced_and_lose_nothing_else():
    assert clipped(b"ok\xff\xe4\n", cap=100).text() == "ok\ufffd\ufffd\n"
    assert clipped(b"\xed\xa0\x80", cap=100).text() == "\ufffd" * 3


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 50))
def test_clip_keeps_exactly_head_and_tail(pieces, cap):
    whole = b"".join(pieces)
    clip = clipped(*pieces, cap=cap)
    assert clip.total_bytes == len(whole)
    assert clip.truncated == (len(whole) > cap)
    if not clip.truncated:
        assert clip.text() == whole.decode("utf-8", "replace")
    ascii_clip = clipped(*(bytes(byte % 64 + 32 for byte in piece) for piece in pieces), cap=cap)
    if ascii_clip.truncated:
        plain = bytes(byte % 64 + 32 for byte in whole).decode()
        head, _, tail = ascii_clip.text().split("\n")
        assert head == plain[: cap // 2]
        assert tail == plain[len(plain) - (cap - cap // 2) :]


def test_limits_follow_the_environment():
    environment = Environment(memory_bytes=100 << 20, disk_bytes=1 << 20, max_processes=7)
    limits = process_limits(environment)
    assert limits["RLIMIT_AS"] == 100 << 20
    assert limits["RLIMIT_FSIZE"] == 1 << 20
    assert limits["RLIMIT_CPU"] == 3600
    assert limits["RLIMIT_NPROC"] == 9
    assert limits["RLIMIT_SIGPENDING"] == 512


HYBRID_OWN = "9:name=systemd:/\n8:pids:/\n4:memory:/jobs/7\n1:cpu:/\n0::/"
HYBRID_MOUNTS = """\
30 25 0:27 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
31 25 0:28 / /sys/fs/cgroup/memory rw,relatime shared:10 - cgroup cgroup rw,memory
32 25 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_hybrid_machines_use_their_own_v1_groups():
    freezing, place = cgroup_places(HYBRID_OWN, HYBRID_MOUNTS)
    assert place == CgroupPlace(
        version=1, memory="/sys/fs/cgroup/memory/jobs/7", pids="/sys/fs/cgroup/pids"
    )
    assert freezing == replace(place, freezer="/sys/fs/cgroup/unified")
    assert freezing.below("x").folders == (
        "/sys/fs/cgroup/memory/jobs/7/x", "/sys/fs/cgroup/pids/x", "/sys/fs/cgroup/unified/x"
    )  # fmt: skip
    assert place.below("x").quota(1.0) == {}
    settings = place.below("x").settings(memory_bytes=5, max_processes=3)
    assert settings == {
        "/sys/fs/cgroup/memory/jobs/7/x/memory.limit_in_bytes": "5",
        "/sys/fs/cgroup/pids/x/pids.max": "4",
    }
    assert place.further_settings(memory_bytes=5) == {
        "/sys/fs/cgroup/memory/jobs/7/memory.memsw.limit_in_bytes": "5",
        "/sys/fs/cgroup/memory/jobs/7/memory.kmem.tcp.limit_in_bytes": "5",
    }


def test_processor_time_is_limited_where_its_controller_is():
    mount = "33 25 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    own = HYBRID_OWN.replace("1:cpu:/", "1:cpu,cpuacct:/jobs")
    group = cgroup_places(own, HYBRID_MOUNTS + mount)[-1].below("x")
    assert group.folders == (
        "/sys/fs/cgroup/memory/jobs/7/x", "/sys/fs/cgroup/pids/x",
        "/sys/fs/cgroup/cpu,cpuacct/jobs/x",
    )  # fmt: skip
    (file,) = group.quota(1.0)
    assert group.quota(2.5) == {file: "250000"}
    assert group.quota(1e-9) == {file: "1000"}  # 0 or less would be no limit at all
    assert file == "/sys/fs/cgroup/cpu,cpuacct/jobs/x/cpu.cfs_quota_us"


def test_unified_machines_try_the_own_group_and_then_its_ancestors():
    mounts = "32 25 0:29 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
    places = cgroup_places("0::/user.slice/session-1.scope", mounts)
    assert [place.memory for place in places] == [
        "/sys/fs/cgroup/user.slice/session-1.scope",
        "/sys/fs/cgroup/user.slice",
        "/sys/fs/cgroup",
    ]
    assert {place.version for place in places} == {2}
    assert all(place.freezer == place.memory for place in places)
    assert places[0].folders == ("/sys/fs/cgroup/user.slice/session-1.scope",)
    assert places[2].below("x").quota(0.5) == {"/sys/fs/cgroup/x/cpu.max": "50000 100000"}
    settings = places[2].settings(memory_bytes=5, max_processes=3)
    assert settings == {"/sys/fs/cgroup/memory.max": "5", "/sys/fs/cgroup/pids.max": "4"}
    further = places[2].further_settings(memory_bytes=5)
    assert further == {"/sys/fs/cgroup/memory.swap.max": "0"}


def test_a_mount_that_shows_part_of_the_hierarchy_is_never_left():
    mounts = "32 25 0:29 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    places = cgroup_places("0::/docker/abc/inner", mounts)
    assert [place.memory for place in places] == ["/sys/fs/cgroup/inner", "/sys/fs/cgroup"]
    assert cgroup_places("0::/elsewhere", mounts) == ()
    assert cgroup_places("", "") == ()


def limited(folder, **files):
    """A control group that is a plain folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def test_the_smallest_limit_of_memory_of_the_own_group_and_those_above_counts(tmp_path):
    mounts = f"32 25 0:29 / {tmp_path} rw,relatime - cgroup2 cgroup2 rw\n"
    limited(tmp_path / "jobs/inner", memory_max="max")
    assert memory_limit("0::/jobs/inner", mounts) is None
    limited(tmp_path / "jobs", memory_max=1 << 30)
    assert memory_limit("0::/jobs/inner", mounts) == 1 << 30
    limited(tmp_path / "jobs/inner", memory_max=2 << 30)
    assert memory_limit("0::/jobs/inner", mounts) == 1 << 30
    limited(tmp_path / "jobs/other", memory_max=5)
    assert memory_limit("0::/jobs/inner", mounts) == 1 << 30
    assert memory_limit("", "") is None


def test_a_container_that_sees_no_group_of_its_own_has_the_limit_of_what_it_sees(tmp_path):
    """Of v1, where the mount shows the container's group as its root."""
    mounts = f"31 25 0:28 /docker/abc {tmp_path} rw - cgroup cgroup rw,memory\n"
    limited(tmp_path, memory_limit_in_bytes=3 << 30)
    assert memory_limit("4:memory:/docker/abc", mounts) == 3 << 30
    assert memory_limit("4:memory:/", mounts) == 3 << 30
