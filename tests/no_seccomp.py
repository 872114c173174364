"""Runs a command as a strict container would: `python no_seccomp.py COMMAND ...`. The kernel then
refuses the command, and all that it starts, a filter of system calls and new namespaces."""

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_nb.environments import supervisor
from grpo_nb.environments.supervisor import ALLOW, EQUAL, LOAD, NUMBER, REFUSE, RETURN

FIRST_ARGUMENT = 16  # where the filter reads it
CALLS = {"x86_64": (157, 317, 272), "aarch64": (167, 277, 97)}  # prctl, seccomp, unshare


def install():
    "The filter, for this process and all that it starts; it cannot be taken off again."
    prctl, seccomp, unshare = CALLS[os.uname().machine]
    lines = [
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 4, 0, seccomp),
        (EQUAL, 3, 0, unshare),
        (EQUAL, 0, 3, prctl),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, supervisor.SET_SECCOMP),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    program = (supervisor.Instruction * len(lines))(*[supervisor.Instruction(*i) for i in lines])
    supervisor.prctl(supervisor.SET_NO_NEW_PRIVS, 1)
    supervisor.prctl(
        supervisor.SET_SECCOMP, 2, ctypes.byref(supervisor.Filter(len(lines), program))
    )


if __name__ == "__main__":
    install()
    os.execvp(sys.argv[1], sys.argv[1:])
