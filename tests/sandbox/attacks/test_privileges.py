"""Becoming more than one is."""

import os
import resource
import struct

from tests.sandbox.attacks.attack import Family
from tests.sandbox.attacks.probe import Held, forked, variants

FAMILY = Family("privileges")
NO_POWER = "no capabilities, and no way to new ones"


def test_held_inside_and_open_outside(attack, trial):
    trial(attack)


@FAMILY.attack(
    "become root, or a member of other groups",
    held_by="a user namespace with one user, who is not root on the host",
    root=True,
)
def become_root(given):
    variants(
        lambda: forked(lambda: os.setuid(0)),
        lambda: forked(lambda: os.setgroups([0])),
    )


@FAMILY.attack("have capabilities", held_by="none are left in any set", root=True)
def have_capabilities(given):
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    if not any(int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")):
        raise Held("none")


@FAMILY.attack(
    "start a program that runs as its owner, root",
    held_by="no new privileges, and everything is mounted without set-user-id",
)
def start_as_owner(given):
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    if fields["NoNewPrivs"].strip() == "1" and os.statvfs("/usr").f_flag & os.ST_NOSUID:
        raise Held("it would run as this user")


@FAMILY.attack(
    "give a program capabilities of its own",
    held_by=NO_POWER,
    root=True,
    optional="a file system with attributes",
)
def give_capabilities(given):
    with open("program", "w"):
        pass
    os.setxattr("program", "security.capability", struct.pack("<5I", 0x02000000, 1, 0, 0, 0))
    os.unlink("program")


@FAMILY.attack("give a file to another user", held_by="only one user is known inside", root=True)
def give_file_away(given):
    with open("file", "w"):
        pass
    os.chown("file", 65_534, 65_534)


@FAMILY.attack("raise one's priority, to starve all others", held_by=NO_POWER, root=True)
def raise_priority(given):
    forked(lambda: os.nice(-1))


@FAMILY.attack(
    "raise one's limits",
    held_by="they are hard ones; " + NO_POWER,
    control="a harness that sets soft limits",
)
def raise_limits(given):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def act():
        most = hard + 1
        if given["unprotected"]:
            most = hard
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except ValueError as error:
            raise Held(str(error)) from error

    assert soft == hard or given["unprotected"], "a soft limit is none"
    forked(act)


@FAMILY.attack(
    "be spared when memory runs out, so that others are ended",
    held_by=NO_POWER,
    control="primitive: what a process took upon itself it may take off",
)
def be_spared(given):
    def act():
        with open("/proc/self/oom_score_adj") as file:
            least = int(file.read())
        taken = [least + 1, least] if given["unprotected"] else [max(-1000, least - 1)]
        for score in taken:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write(str(score))

    forked(act)
