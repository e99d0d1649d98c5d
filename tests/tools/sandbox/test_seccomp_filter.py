"""The system-call filter, decided by a BPF machine of our own: both architectures, whatever machine runs this."""

from __future__ import annotations

import os

import pytest
from bpf import verdict

from verl_mt.errors import PluginError
from verl_mt.extensions.toolbox.sandbox.seccomp import ALLOW, DENY, IGNORE, KILL, UNKNOWN, UNSUPPORTED, build_filter

X86, ARM = 0xC000003E, 0xC00000B7
MACHINES = {"x86_64": X86, "aarch64": ARM}
# Numbers from the kernel's tables, written down again: x86_64, aarch64.
FORBIDDEN = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "truncate": (76, 45),
    "open_tree": (428, 428),
    "open_by_handle_at": (304, 265),
    "pwritev2": (328, 287),
    "removexattr": (197, 14),
    "lchown": (94, None),
    "chown": (92, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "setrlimit": (160, 164),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "keyctl": (250, 219),
    "mknodat": (259, 33),
    "reboot": (169, 142),
}


@pytest.mark.parametrize("column, machine", list(enumerate(MACHINES)))
def test_nothing_that_leads_out_is_allowed(column, machine):
    program = build_filter(machine)
    for name, numbers in FORBIDDEN.items():
        if numbers[column] is not None:
            got = verdict(program, number=numbers[column], architecture=MACHINES[machine])
            assert got == DENY, name


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_has_a_verdict_and_few_are_allowed(machine):
    program = build_filter(machine)
    got = [verdict(program, number=n, architecture=MACHINES[machine]) for n in range(1024)]
    assert set(got) == {ALLOW, DENY, IGNORE, UNKNOWN, UNSUPPORTED}
    assert sum(v == ALLOW for v in got) < 130 and all(v == DENY for v in got[480:])


def test_another_architecture_is_killed_and_x32_numbers_are_denied():
    program = build_filter("x86_64")
    assert verdict(program, number=0, architecture=0x40000003) == KILL  # i386: other numbers, other meanings
    assert verdict(program, number=0, architecture=ARM) == KILL
    assert verdict(program, number=0x40000000 + 41, architecture=X86) == DENY
    assert verdict(program, number=0x40000000, architecture=X86) == DENY


@pytest.mark.parametrize("column, machine", list(enumerate(MACHINES)))
def test_arguments_decide_where_one_call_can_do_good_and_harm(column, machine):
    program, architecture = build_filter(machine), MACHINES[machine]

    def call(numbers, *arguments):
        return verdict(program, number=numbers[column], architecture=architecture, arguments=arguments)

    openat, fcntl, ioctl, socketpair, sendto, prlimit = (257, 56), (72, 25), (16, 29), (53, 199), (44, 206), (302, 261)
    assert call(openat, 0, 1, os.O_RDONLY) == call(openat, 0, 1, os.O_WRONLY | os.O_TRUNC) == ALLOW
    assert call(openat, 0, 1, os.O_RDONLY | os.O_TRUNC) == DENY
    assert call(fcntl, 3, 1030) == ALLOW and call(fcntl, 3, 8) == call(fcntl, 3, 10) == DENY  # F_SETOWN, F_SETSIG
    assert {call(fcntl, 3, how) for how in (6, 7, 37, 38)} == {IGNORE} and call(fcntl, 3, 5) == ALLOW  # locks
    assert call(ioctl, 3, 0x5401) == ALLOW and call(ioctl, 3, 0x5412) == call(ioctl, 3, 0x8901) == DENY  # TIOCSTI
    assert [call((316, 276), 1, 2, 3, 4, flags) for flags in (0, 1, 2, 4, 5)] == [ALLOW] * 3 + [DENY] * 2  # a device
    assert call(socketpair, 1) == ALLOW and call(socketpair, 2) == DENY
    assert call(sendto, 3, 4, 5, 0, 0) == ALLOW
    assert call(sendto, 3, 4, 5, 0, 1) == call(sendto, 3, 4, 5, 0, 1 << 32) == DENY
    assert call(prlimit, 0, 7, 0) == ALLOW
    assert call(prlimit, 1, 7, 0) == call(prlimit, 0, 7, 1) == call(prlimit, 0, 7, 1 << 40) == DENY


@pytest.mark.parametrize("column, machine", list(enumerate(MACHINES)))
def test_only_a_file_opened_for_writing_can_be_emptied(column, machine):
    program, architecture = build_filter(machine), MACHINES[machine]

    def allowed(name, flags):
        number, first = {"open": ((2, None), ()), "openat": ((257, 56), (2**32 - 100,))}[name]
        arguments = (*first, 1, flags, 0o600)
        return verdict(program, number=number[column], architecture=architecture, arguments=arguments) == ALLOW

    other = os.O_CLOEXEC | os.O_CREAT | os.O_NONBLOCK | os.O_APPEND | 0o20000000
    for name in ("open", "openat") if machine == "x86_64" else ("openat",):
        for more in (0, other, 1 << 32):
            assert all(allowed(name, mode | more) for mode in (0, 1, 2)), name
            assert all(allowed(name, mode | more | os.O_TRUNC) for mode in (1, 2)), name
            assert not any(allowed(name, mode | more) for mode in (3, os.O_TRUNC, 3 | os.O_TRUNC)), name
    openat2 = verdict(program, number=437, architecture=architecture, arguments=(0, 1, 2, 24))
    assert openat2 == UNKNOWN  # its flags lie behind a pointer, which a filter cannot read


@pytest.mark.parametrize("column, machine", list(enumerate(MACHINES)))
def test_no_call_takes_room_without_writing(column, machine):
    program, architecture, fallocate = build_filter(machine), MACHINES[machine], (285, 47)[column]
    for mode in (0, 1, 3, 16):  # FALLOC_FL_KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
        got = verdict(program, number=fallocate, architecture=architecture, arguments=(3, mode, 0, 4096))
        assert got == UNSUPPORTED


def test_an_architecture_without_a_table_is_refused_by_name():
    with pytest.raises(PluginError, match=r"no system-call filter for riscv64. Supported: x86_64, aarch64"):
        build_filter("riscv64")
