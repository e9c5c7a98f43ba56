"""Ports that nothing takes between the moment a test asks for one and the moment its job listens there.

A port that the system picks (`bind` to 0) is from the range that it also gives to every outgoing connection, so once
the probe is closed any process of another test may get it. These are from below that range, and each belongs to one
process of the tests, through a locked file, until that process ends.
"""

import errno
import fcntl
import os
import random
import socket
import tempfile
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LOWEST = 15000
_held: list[int] = []  # descriptors of the locked files: closing one, or ending, gives its port back


def free_port() -> int:
    """A port on which this machine listens nowhere, in IPv4 and IPv6, and that no other test is given."""
    folder = Path(tempfile.gettempdir()) / f"booster-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    ports = list(range(_LOWEST, _lowest_given_to_connections()))
    for port in random.SystemRandom().sample(ports, len(ports)):  # a test that sets a seed gets no known port
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if _nobody_listens(port):
            _held.append(lock)
            return port
        os.close(lock)
    raise RuntimeError(f"none of the ports from {ports[0]} to {ports[-1]} is free")


def _lowest_given_to_connections() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32768


def _nobody_listens(port: int) -> bool:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family)
        except OSError:
            continue  # this machine does not speak that family
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:  # it has no address of that family
                    continue
                return False
    return True


def listening(pids):
    """(address, port) of every socket that processes `pids` listen on."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                packed = b"".join(words)
                found.append((IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed), int(port, 16)))
    return found
