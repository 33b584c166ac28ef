import os
import socket

import pytest

from posttrain.sandbox import workspace


@pytest.fixture
def root(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "root"
    (folder / "real").mkdir(parents=True)
    (folder / "real" / "file.txt").write_bytes(b"content")
    (folder / "link.txt").symlink_to("../secret.txt")
    (folder / "inner_link.txt").symlink_to("real/file.txt")
    (folder / "up").symlink_to("..")
    (folder / "alias").symlink_to("real")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    descriptor = os.open(folder, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_reads_the_first_bytes_of_a_regular_file(root):
    assert workspace.read(root, ("real", "file.txt"), max_bytes=100) == b"content"
    assert workspace.read(root, ("real", "file.txt"), max_bytes=3) == b"con"
    assert workspace.read(root, ("real", "file.txt"), max_bytes=0) == b""


@pytest.mark.parametrize(
    "parts",
    [
        ("link.txt",), ("inner_link.txt",), ("up", "secret.txt"), ("alias", "file.txt"),
        ("fifo",), ("socket",), ("real",), ("missing",), ("real", "file.txt", "x"), ("a" * 300,),
    ],
)  # fmt: skip
def test_links_pipes_and_folders_are_no_files(root, parts):
    assert workspace.read(root, parts, max_bytes=100) is None


def test_writes_make_folders_and_replace_the_content(root):
    workspace.write(root, ("new", "deep", "x"), b"long content")
    workspace.write(root, ("new", "deep", "x"), b"short")
    assert workspace.read(root, ("new", "deep", "x"), max_bytes=100) == b"short"


@pytest.mark.parametrize(
    "parts", [("link.txt",), ("up", "secret.txt"), ("alias", "new"), ("fifo",), ("real",)]
)
def test_writes_never_pass_a_link_or_a_pipe(root, parts, tmp_path):
    with pytest.raises(OSError, match=r"\[Errno"):
        workspace.write(root, parts, b"overwritten")
    assert (tmp_path / "secret.txt").read_text() == "secret"
    assert sorted(os.listdir(tmp_path / "root" / "real")) == ["file.txt"]
