"""Runs model-written code in a process that has locked itself in. Started as a script; the standard library only.

The first line of stdin says how to lock in, every further line is one piece of code; on the control pipe one line of
JSON answers each. What the code prints goes to stdout. Nothing in here trusts the code: the parent holds the clock and
the kill.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import linecache
import os
import resource
import struct
import sys
import traceback
import types

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_EXECUTE, _MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1, 1 << 6, 1 << 9, 1 << 10, 1 << 11
_DEVICES = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/zero": _READ_FILE, "/dev/urandom": _READ_FILE}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Unavailable(Exception):
    """This machine cannot isolate; the text says what is missing."""


def lock_in(setup: dict) -> None:
    """Give up everything but computing, reading `setup["readable"]` and the folder `setup["folder"]`.

    Raises:
        Unavailable: the kernel refuses one of the steps.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != setup["parent"]:
        os._exit(1)
    # When memory is short, the kernel is to end this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.chdir(setup["folder"])
    for name, value in setup["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    _restrict_files(setup["folder"], setup["readable"])
    _drop_capabilities()
    _filter_system_calls(bytes.fromhex(setup["filter"]))


def landlock_version() -> int:
    """The kernel's version of Landlock's interface.

    Raises:
        Unavailable: there is none.
    """
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise Unavailable(
            f"Landlock is missing ({os.strerror(ctypes.get_errno())}): it needs Linux 5.13 or newer, built with "
            "CONFIG_SECURITY_LANDLOCK and with landlock among the kernel's lsm= modules, and a container runtime that "
            "lets its three system calls through"
        )
    return version


def ruleset_attributes(version: int) -> tuple[int, bytes]:
    """All rights over files that this version can take away, and the struct that takes these and all others away."""
    # 13 in the first version, then: refer, truncate, (network,) ioctl of devices.
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    return files, struct.pack("=QQQ", files, network, scoped)[:size]


def _restrict_files(folder: str, readable: list[str]) -> None:
    files, attributes = ruleset_attributes(landlock_version())
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    rights = dict.fromkeys(readable, _READ_FILE | _READ_DIR) | _DEVICES
    rights[folder] = files & ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK)
    for path, allowed in rights.items():
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            allowed &= ~_READ_DIR
        rule = struct.pack("=Qi", allowed, handle)
        _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule({path})")
        os.close(handle)
    _check(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def _filter_system_calls(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    loaded = Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(loaded), 0, 0), "seccomp (CONFIG_SECCOMP_FILTER)")


def _check(result: int, what: str) -> None:
    if result < 0:
        raise Unavailable(f"{what} failed: {os.strerror(ctypes.get_errno())}")


def run(code: str, namespace: dict, name: str) -> bool:
    """Execute; a last line that is an expression is shown, as in a notebook. Returns whether it raised."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
        return False
    except SystemExit as error:
        if error.code not in (None, 0):
            print(f"SystemExit: {error.code}")
        return False
    except BaseException as error:
        # Our own frame is none of the model's business.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        if isinstance(error, SyntaxError):
            trace = None
        traceback.print_exception(type(error), error, trace, file=sys.stdout)
        return True


def main() -> None:
    """Lock in, say so, then serve code until stdin ends."""
    inherited = int(sys.argv[1])
    control = os.dup(inherited)  # a low number, whatever this process's parent had open: RLIMIT_NOFILE bounds them
    os.close(inherited)
    with open(os.dup(0), encoding="utf-8") as commands:
        setup = json.loads(commands.readline())
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        try:
            lock_in(setup)
        except (Unavailable, OSError, ValueError, AttributeError) as error:
            os.write(control, (json.dumps({"unavailable": str(error)}) + "\n").encode())
            return
        stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        module = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv, sys.path[0] = module, [""], ""
        sys.stdout = sys.stderr = stdout
        os.write(control, b'{"ready": true}\n')
        for count, line in enumerate(commands, start=1):
            raised = run(json.loads(line), vars(module), f"<call {count}>" if setup["keeps_state"] else "<code>")
            sys.stdout = sys.stderr = stdout
            with contextlib.suppress(ValueError, OSError):  # the code closed it: nothing can be shown
                stdout.flush()
            os.write(control, (json.dumps({"raised": raised}) + "\n").encode())


if __name__ == "__main__":
    main()
