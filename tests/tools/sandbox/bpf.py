"""A classic-BPF machine: what a seccomp filter decides about a system call, without a kernel."""

from __future__ import annotations

import struct

LOAD, AND, JUMP_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06


def verdict(program: bytes, *, number: int, architecture: int, arguments: tuple[int, ...] = ()) -> int:
    """The filter's return value; fails if the program runs off its end or has an unknown instruction."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    code = [struct.unpack_from("=HBBI", program, k) for k in range(0, len(program), 8)]
    accumulator, position = 0, 0
    while True:
        kind, if_true, if_false, operand = code[position]
        position += 1
        if kind == LOAD:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif kind == AND:
            accumulator &= operand
        elif kind == JUMP_EQUAL:
            position += if_true if accumulator == operand else if_false
        else:
            assert kind == RETURN, kind
            return operand
