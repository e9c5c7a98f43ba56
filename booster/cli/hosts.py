"""Which machines a job runs on: --host, --hostfile, --include and --exclude."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from booster.foreign_files import read_regular

__all__ = ["Host", "chosen_hosts", "is_host_name", "is_local", "read_hostfile"]

# A user, a name or address, no leading dash: ssh would read "-oProxyCommand=..." as an option.
_HOST_PATTERN = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]*")
_LARGEST_HOSTFILE = 2**24  # bytes


@dataclass(frozen=True)
class Host:
    """A machine; slots: processes to start there, None where the hostfile does not say."""

    name: str
    slots: int | None = None


def read_hostfile(path: str) -> list[Host]:
    """Read one host a line, optionally `slots=N`; `#` starts a comment, empty lines count for nothing.

    Errors: ValueError naming the file, the line number and the fault.
    """
    try:
        text = read_regular(Path(path), _LARGEST_HOSTFILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hostfile {path!r} cannot be read: {error}") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"hostfile {path!r}, line {number}"
        name = _checked_name(words[0], where)
        if name in {host.name for host in hosts}:
            raise ValueError(f"{where}: {name!r} was listed before; give each host once, with slots=N processes")
        slots = None
        for word in words[1:]:
            match = re.fullmatch(r"slots=([1-9][0-9]*)", word)
            if match is None or slots is not None:
                raise ValueError(f"{where}: {word!r} is not understood; a line is `HOST` or `HOST slots=N`, N >= 1")
            slots = int(match[1])
        hosts.append(Host(name, slots))
    if not hosts:
        raise ValueError(f"hostfile {path!r} lists no host; write one host a line")
    return hosts


def chosen_hosts(*, host: str | None, hostfile: str | None, include: str | None, exclude: str | None) -> list[Host]:
    """Return the machines the options name, in order (the first is node 0); [] where no option names any.

    Errors: ValueError for options that contradict each other and for unknown or repeated hosts.
    """
    if host is not None and hostfile is not None:
        raise ValueError("--host and --hostfile were both given; keep one (--include selects from a hostfile)")
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude were both given; keep one")
    if hostfile is None:
        if include is not None or exclude is not None:
            option = "--include" if include is not None else "--exclude"
            raise ValueError(
                f"{option} selects from a hostfile and none was given; add --hostfile, or list the hosts by --host"
            )
        return [Host(name) for name in _names(host, "--host")] if host is not None else []
    hosts = read_hostfile(hostfile)
    known = [entry.name for entry in hosts]
    if include is not None:
        wanted = _known(_names(include, "--include"), known, "--include")
        return [entry for entry in hosts if entry.name in wanted]
    if exclude is not None:
        unwanted = _known(_names(exclude, "--exclude"), known, "--exclude")
        hosts = [entry for entry in hosts if entry.name not in unwanted]
        if not hosts:
            raise ValueError(f"--exclude {exclude} leaves no host of {known}")
    return hosts


def is_host_name(text: str) -> bool:
    """Say whether `text` is written as names and addresses of machines are, which says nothing of whether it is known."""
    return _HOST_PATTERN.fullmatch(text) is not None


def is_local(name: str) -> bool:
    """Say whether `name` is this machine by its usual names, so that no ssh is needed."""
    return name in {"localhost", "127.0.0.1", "::1", socket.gethostname()}


def _names(text: str, option: str) -> list[str]:
    names = [_checked_name(name.strip(), option) for name in text.split(",")]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{option} {text}: {repeated[0]!r} is given twice")
    return names


def _checked_name(name: str, where: str) -> str:
    if not is_host_name(name):
        raise ValueError(f"{where}: {name!r} is not a host; give names or addresses, for instance node1,node2")
    return name


def _known(names: Sequence[str], known: Sequence[str], option: str) -> set[str]:
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is not in the hostfile, which lists {list(known)}")
    return set(names)
