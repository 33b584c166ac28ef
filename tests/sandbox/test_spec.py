import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.task import Environment
from posttrain.sandbox.spec import Disk, bubblewrap_arguments, workspace_parts

LAYOUT = {"disk": "/d", "etc": "/e", "empty": "/n", "system": {"/usr": "", "/bin": "usr/bin"}}


@pytest.mark.parametrize(
    "path", ["", "/", "..", "a/../b", "/etc/passwd", "/workspace", "/workspace/", "a\0b", "./."]
)
def test_paths_that_are_no_file_of_the_workspace_are_refused(path):
    with pytest.raises(UsageError, match="workspace"):
        workspace_parts(path)


@given(st.text(max_size=30))
def test_accepted_paths_have_only_plain_components(path):
    try:
        parts = workspace_parts(path)
    except UsageError:
        return
    assert parts
    assert all(part not in ("", ".", "..") and "/" not in part for part in parts)


def test_every_bind_that_can_be_written_lies_on_the_capped_disk():
    arguments = bubblewrap_arguments(**LAYOUT)
    writable = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--bind"]
    assert sorted(writable) == ["/d/shm", "/d/tmp", "/d/work"]
    assert "--tmpfs" not in arguments
    remounted = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--remount-ro"]
    assert remounted == ["/dev", "/"]


def test_artefacts_are_mounted_read_only_and_only_where_there_are_any():
    assert "/artefacts" not in bubblewrap_arguments(**LAYOUT)
    arguments = bubblewrap_arguments(**LAYOUT, artefacts="/a")
    assert arguments[arguments.index("/a") - 1 : arguments.index("/a") + 2] == (
        "--ro-bind", "/a", "/artefacts",
    )  # fmt: skip


def test_links_of_a_merged_system_stay_links():
    arguments = " ".join(bubblewrap_arguments(**LAYOUT))
    assert "--symlink usr/bin /bin" in arguments
    assert "--ro-bind /usr /usr" in arguments


def test_inodes_are_bounded_with_the_disk():
    assert Disk.of(Environment(disk_bytes=64 << 20)).inodes == 16_384
    assert "nr_inodes=256" in Disk.of(Environment(disk_bytes=1)).mount_options
