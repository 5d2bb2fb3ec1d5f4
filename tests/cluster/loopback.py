"""Run a command in a network namespace that has loopback only, because Ray listens on every interface that it finds.

    python -m tests.cluster.loopback COMMAND...

Needs Linux and the right to make a network namespace, as root or by a namespace of users; where there is none,
the command runs as it is, and a line on stderr says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
INTERFACE = struct.Struct("16sh14x")


def leave_network() -> bool:
    """Enter a network namespace that has loopback only; False if that is not possible."""
    if sys.platform != "linux":
        return False
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    user, group = os.getuid(), os.getgid()
    if unshare(CLONE_NEWNET) != 0:
        if unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as control:
        flags = INTERFACE.unpack(fcntl.ioctl(control, SIOCGIFFLAGS, INTERFACE.pack(b"lo", 0)))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, INTERFACE.pack(b"lo", flags | IFF_UP))
    return True


if __name__ == "__main__":
    if leave_network():
        # No other user can connect, and a token would be left in the home directory.
        os.environ["RAY_AUTH_MODE"] = "disabled"
    else:
        print("no namespace of the network could be made: Ray listens on all interfaces", file=sys.stderr)
    os.execvp(sys.argv[1], sys.argv[1:])
