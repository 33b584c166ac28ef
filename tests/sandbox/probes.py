"""Attempts to get out, each harmless by itself: it opens, asks and looks, and changes nothing.

Run as a program by any Python 3.9+. Prints {name: "open" or what held it}. Standard input is a
JSON object with the host's ports, names and markers.
"""

import contextlib
import ctypes
import errno
import glob
import json
import os
import platform
import socket
import sys

GIVEN = json.load(sys.stdin)
LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"


class Held(Exception):
    pass


def opened(path, flags):
    os.close(os.open(path, flags))


def write_core_pattern():
    opened("/proc/sys/kernel/core_pattern", os.O_WRONLY)


def write_drop_caches():
    opened("/proc/sys/vm/drop_caches", os.O_WRONLY)


def write_sysrq():
    opened("/proc/sysrq-trigger", os.O_WRONLY)


def read_shadow():
    opened("/etc/shadow", os.O_RDONLY)


def see_host_environment():
    for path in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if GIVEN["secret"].encode() in file.read():
                return
    raise Held("no process shows it")


def see_host_processes():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if GIVEN["process"].encode() in file.read():
                return
    raise Held("not among the processes")


def signal_host_process():
    os.kill(GIVEN["pid"], 0)


def see_project():
    os.listdir(GIVEN["project"])


def see_interpreter_of_host():
    opened(GIVEN["python"], os.O_RDONLY)


def see_host_run():
    os.listdir("/run")


def see_host_file():
    opened(GIVEN["file"], os.O_RDONLY)


def connect_tcp():
    socket.create_connection(("127.0.0.1", GIVEN["port"]), timeout=2).close()


def send_udp_outside():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect(("192.0.2.1", 9))


def connect_abstract():
    with socket.socket(socket.AF_UNIX) as out:
        out.connect("\0" + GIVEN["abstract"])


def connect_path():
    with socket.socket(socket.AF_UNIX) as out:
        out.connect(GIVEN["socket"])


def write_root():
    with open(f"/{GIVEN['process']}", "x"):
        os.unlink(f"/{GIVEN['process']}")


def write_dev():
    with open(f"/dev/{GIVEN['process']}", "x"):
        os.unlink(f"/dev/{GIVEN['process']}")


def write_usr():
    if not os.access("/usr", os.W_OK):
        raise Held("not writable")


def see_init():
    os.listdir("/proc/1/fd")


def keep_descriptors():
    extra = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, 3}
    if not extra:
        raise Held("only the standard ones")


def hold_capabilities():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    if int(fields["CapEff"], 16) == 0 and fields["NoNewPrivs"].strip() == "1":
        raise Held("none, and no new ones")


def be_root():
    if os.getuid() != 0:
        os.setuid(0)


def make_device():
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), GIVEN["process"])
    os.mknod(path, 0o20600, os.makedev(1, 3))
    os.unlink(path)


def vsock():
    socket.socket(40, socket.SOCK_STREAM).close()


def kernel_crypto():
    socket.socket(38, socket.SOCK_SEQPACKET).close()


def call(x86, arm, *arguments):
    """Whether the kernel looks at a call's (invalid) arguments at all."""
    LIBC.syscall(x86 if X86 else arm, *(ctypes.c_long(a) for a in arguments))
    number = ctypes.get_errno()
    if number in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        raise Held(os.strerror(number))


CALLS = {
    "io_uring": (425, 425, 0, 0), "bpf": (321, 280, -1, 0, 0),
    "add_key": (248, 217, 0, 0, 0, 0, 0), "keyctl": (250, 219, -1, 0, 0),
    "userfaultfd": (323, 282, -1), "perf": (298, 241, 0, 0, -1, -1, 0),
    "ptrace": (101, 117, 16, 0x3FFFFFFF, 0, 0), "setns": (308, 268, -1, 0),
    "open_tree": (428, 428, -1, 0, -1), "fsopen": (430, 430, 0, -1),
    "handle": (304, 265, -1, 0, 0), "kernel_log": (103, 116, 10, 0, 0),
}  # fmt: skip

NEW_USER_NAMESPACE = 0x10000000


def nest_user_namespace():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if LIBC.unshare(NEW_USER_NAMESPACE) == 0 else 1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise Held("refused")


PROBES = {
    probe.__name__: probe
    for probe in (
        write_core_pattern, write_drop_caches, write_sysrq, read_shadow, see_host_environment,
        see_host_processes, signal_host_process, see_project, see_interpreter_of_host, see_host_run,
        see_host_file, connect_tcp, send_udp_outside, connect_abstract, connect_path, write_root,
        write_dev, write_usr, see_init, keep_descriptors, hold_capabilities, be_root, make_device,
        vsock, kernel_crypto, nest_user_namespace,
    )
}  # fmt: skip
PROBES.update({name: lambda numbers=numbers: call(*numbers) for name, numbers in CALLS.items()})


def main():
    found = {}
    for name, probe in PROBES.items():
        try:
            probe()
            found[name] = "open"
        except (OSError, Held) as error:
            found[name] = str(error) or type(error).__name__
    print(json.dumps(found))


if __name__ == "__main__":
    main()
