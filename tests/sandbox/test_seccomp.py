"""The filter is run here by a small interpreter of classic BPF, so that both architectures are
tested on either.
"""

import struct

import pytest

from posttrain.sandbox.seccomp import MACHINES, NEW_NAMESPACES, program

ALLOW, KILL, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061


def verdict(code: bytes, *, arch: int, call: int, arguments=()) -> int:
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", call, arch, 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", code))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return value
        else:
            hit = {
                0x15: accumulator == value, 0x35: accumulator >= value, 0x45: accumulator & value
            }[operation]  # fmt: skip
            at += if_true if hit else if_false


@pytest.mark.parametrize("name", list(MACHINES))
def test_listed_calls_are_denied_and_others_pass(name):
    machine, code = MACHINES[name], program(name)

    def ask(call, *arguments):
        return verdict(code, arch=machine.audit, call=call, arguments=arguments)

    for call in machine.denied.values():
        assert ask(call) == EPERM
    assert ask(435) == ENOSYS
    special = {*machine.denied.values(), machine.clone, *machine.sockets, machine.ioctl, 435}
    for call in set(range(470)) - special:
        assert ask(call) == ALLOW, call
    assert ask(machine.clone, 0x01200011) == ALLOW
    for bit in range(32):
        wanted = EPERM if NEW_NAMESPACES >> bit & 1 else ALLOW
        assert ask(machine.clone, 1 << bit) == wanted
    for family in range(46):
        wanted = ALLOW if family in (1, 2, 10, 16) else EAFNOSUPPORT
        assert {ask(call, family) for call in machine.sockets} == {wanted}
    assert ask(machine.ioctl, 0, 0x5412) == EPERM
    assert ask(machine.ioctl, 0, 0x5401) == ALLOW


@pytest.mark.parametrize("name", list(MACHINES))
def test_a_foreign_calling_convention_never_passes(name):
    assert verdict(program(name), arch=0x40000003, call=39) == KILL


def test_the_second_table_of_x86_64_is_closed():
    code, machine = program("x86_64"), MACHINES["x86_64"]
    assert verdict(code, arch=machine.audit, call=0x40000000 + 521) == ENOSYS


def test_an_unknown_architecture_has_no_filter():
    assert program("vax") is None
