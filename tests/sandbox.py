"""Sandboxes as containers make them: system calls that the kernel refuses from here on."""

from __future__ import annotations

import ctypes
import platform

# By machine; None where no number is known here.
READ_CALL = {"x86_64": 310, "aarch64": 270}.get(platform.machine())  # process_vm_readv
ROBUST_CALL = {"x86_64": 273, "aarch64": 99}.get(platform.machine())  # set_robust_list

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38


def prctl(*args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*args) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def refuse(call: int | None, unless_about: int = -1) -> None:
    """Let a system call fail with EPERM on this thread, but for one first argument."""
    _filter(call, unless_about, 0x00050001)


def forbid(call: int | None, unless_about: int = -1) -> None:
    """Let a system call of this thread end the process, but for one first argument."""
    _filter(call, unless_about, 0x80000000)


def _filter(call: int | None, unless_about: int, action: int) -> None:

    class Instruction(ctypes.Structure):
        _fields_ = (
            ("code", ctypes.c_ushort),
            ("jt", ctypes.c_ubyte),
            ("jf", ctypes.c_ubyte),
            ("k", ctypes.c_uint),
        )

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))

    assert call is not None
    instructions = (Instruction * 6)(
        Instruction(0x20, 0, 0, 0),  # load the number of the call
        Instruction(0x15, 0, 3, call),
        Instruction(0x20, 0, 0, 16),  # load its first argument
        Instruction(0x15, 1, 0, unless_about),
        Instruction(0x06, 0, 0, action),
        Instruction(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(instructions), instructions)), 0, 0)
