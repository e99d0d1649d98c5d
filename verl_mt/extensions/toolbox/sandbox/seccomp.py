"""The system calls that model-written code may make, as a seccomp filter.

An allow-list: what is not named here fails with EPERM, also calls that newer kernels bring. There is no way to a
network (no `socket`, `connect`, `bind`), to another process or thread (no `clone`, `fork`, `execve`, `kill`, `ptrace`),
to memory outside the limit (`memfd_create`, System V), or to limits and priorities of others. What Landlock cannot
see (truncation on open before Linux 6.2, modes and times of files) is decided here too.

Filters are classic BPF: https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import errno
import platform
import struct

from verl_mt.errors import PluginError

ALLOW, KILL = 0x7FFF0000, 0x80000000
DENY = 0x00050000 | errno.EPERM
UNKNOWN = 0x00050000 | errno.ENOSYS
"""For calls that libraries replace by an older one when a kernel does not know them."""
UNSUPPORTED = 0x00050000 | errno.EOPNOTSUPP
"""For calls that libraries do in a slower way where a file system has none."""
IGNORE = 0x00050000
"""The call does nothing and reports success."""

_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _ARCHITECTURE = 0, 4

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand)."""

# name: (x86_64, aarch64), None where an architecture never had it. The most frequent first: the filter is linear.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "futex": (202, 98),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "lseek": (8, 62),
    "close": (3, 57),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "brk": (12, 214),
    "getdents64": (217, 61),
    "stat": (4, None),
    "lstat": (6, None),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "readv": (19, 65),
    "writev": (20, 66),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "msync": (26, 227),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    "fadvise64": (221, 223),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "rename": (82, None),
    "renameat": (264, 38),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "creat": (85, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "umask": (95, 166),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "close_range": (436, 436),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "alarm": (37, None),
    "pause": (34, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getrlimit": (97, 163),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
_IGNORED = {
    # Landlock does not see them, and `shutil.copy` needs them to succeed.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
}
# Their flags lie behind a pointer, which a filter cannot read.
_UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}
# It takes gigabytes in the time that writing takes for megabytes, before anybody has looked; and with
# FALLOC_FL_KEEP_SIZE past RLIMIT_FSIZE.
_UNSUPPORTED = {"fallocate": (285, 47)}

_AUDIT = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""machine -> (column of the tables above, the kernel's name for the architecture)."""

_O_TRUNC, _O_ACCMODE = 0o1000, 0o3
_OPENING = (0, 1, 2, 1 | _O_TRUNC, 2 | _O_TRUNC)
"""Access modes with and without truncation. Opening with mode 0 or 3 and O_TRUNC empties a file that may not be
written: before Linux 6.2 Landlock sees an opening for reading, or (mode 3) for nothing. Mode 3 alone is of no use."""
_FCNTL = (0, 1, 2, 3, 4, 5, 36, 1030, 1032)
"""Duplicating, flags, asking for locks; not F_SETOWN and F_SETSIG, which send signals to others."""
_LOCKING = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and F_OFD_SETLK, F_OFD_SETLKW. A lock on a library's file is seen by every other interpreter, so
that code could pass answers on. Nobody shares the files of an interpreter's folder: a lock there (sqlite3) may
do nothing."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_AF_UNIX = 1


def build_filter(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`.

    Args:
        machine: as `platform.machine()` names it; None = this one.

    Raises:
        PluginError: no table for this architecture.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _AUDIT:
        raise PluginError(f"there is no system-call filter for {machine}. Supported: {', '.join(_AUDIT)}")
    column, audit = _AUDIT[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    verdicts = ((_ALLOWED, ALLOW), (_IGNORED, IGNORE), (_UNKNOWN, UNKNOWN), (_UNSUPPORTED, UNSUPPORTED))
    for table, verdict in verdicts:
        for numbers in table.values():
            program += _rule(numbers[column], [(_RETURN, 0, 0, verdict)])
    for numbers, body in _conditional():
        program += _rule(numbers[column], body)
    program.append((_RETURN, 0, 0, DENY))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _rule(number: int | None, body: list[Instruction]) -> list[Instruction]:
    """If the call has this number, `body`, which ends in a return."""
    return [] if number is None else [(_JUMP_EQUAL, 0, len(body), number), *body]


def _conditional() -> list[tuple[tuple[int | None, int | None], list[Instruction]]]:
    decides = (_AND, 0, 0, _O_TRUNC | _O_ACCMODE)
    return [
        ((257, 56), [*_arg(2), decides, *_one_of(_OPENING)]),  # openat
        ((2, None), [*_arg(1), decides, *_one_of(_OPENING)]),  # open
        # renameat2 with nothing, RENAME_NOREPLACE or RENAME_EXCHANGE: RENAME_WHITEOUT leaves a device behind.
        ((316, 276), [*_arg(4), *_one_of((0, 1, 2))]),
        ((72, 25), [*_arg(1), *_ignored(_LOCKING), *_one_of(_FCNTL)]),  # fcntl
        ((16, 29), [*_arg(1), *_one_of(_IOCTL)]),  # ioctl
        ((53, 199), [*_arg(0), *_one_of((_AF_UNIX,))]),  # socketpair, which asyncio makes for itself
        ((44, 206), _null_pointer(4)),  # sendto without an address: on such a pair
        # prlimit64 of this process, reading only.
        ((302, 261), [*_arg(0), (_JUMP_EQUAL, 1, 0, 0), (_RETURN, 0, 0, DENY), *_null_pointer(2)]),
    ]


def _arg(index: int, *, high: bool = False) -> list[Instruction]:
    """Load one half of an argument; ints and flags are in the low half."""
    return [(_LOAD, 0, 0, 16 + 8 * index + 4 * high)]


def _one_of(values: tuple[int, ...]) -> list[Instruction]:
    return [
        *((_JUMP_EQUAL, len(values) - k, 0, value) for k, value in enumerate(values)),
        (_RETURN, 0, 0, DENY),
        (_RETURN, 0, 0, ALLOW),
    ]


def _ignored(values: tuple[int, ...]) -> list[Instruction]:
    return [step for value in values for step in ((_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, IGNORE))]


def _null_pointer(index: int) -> list[Instruction]:
    return [
        *_arg(index),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, DENY),
        *_arg(index, high=True),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, DENY),
        (_RETURN, 0, 0, ALLOW),
    ]
