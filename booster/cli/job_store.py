"""Where the nodes of a job meet, and their ranks after them: a store that listens on one interface, and unpickles nothing."""

from __future__ import annotations

import ipaddress
import socket
import sys
from datetime import timedelta
from typing import Any

RENDEZVOUS = "booster"  # the name under which torch's launcher finds it
LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)  # of a node that waits for the others


def register() -> None:
    """Make this rendezvous known to torch's launcher, which looks them up by name; again is nothing."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(RENDEZVOUS, _handler)


def loopback_variables() -> dict[str, str]:
    """Return what has the process groups of ranks listen on the loopback interface alone; the job must be on one machine."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]  # of Linux, of macOS and BSD
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


def _handler(parameters: Any) -> Any:
    """Return what torch's launcher asks for when nodes meet: node 0 serves the store, the others connect.

    torch's "c10d" and "static" listen on every interface, and "c10d" unpickles what any client writes there.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    rank, address, port = (parameters.config[name] for name in ("rank", "address", "port"))

    class Rendezvous(RendezvousHandler):
        _store: Any = None

        def get_backend(self) -> str:
            return RENDEZVOUS

        @property
        def use_agent_store(self) -> bool:
            return True

        def next_rendezvous(self) -> RendezvousInfo:
            serves = rank == 0
            listener = _listener(address, port, is_one_machine=parameters.max_nodes == 1) if serves else None
            options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.fileno()}
            where = port if listener is None else listener.getsockname()[1]
            self._store = TCPStore(address, where, parameters.max_nodes, serves, _TIMEOUT, **options)
            if listener is not None:
                listener.detach()  # the store closes it
            return RendezvousInfo(
                PrefixStore(parameters.run_id, self._store),
                rank,
                parameters.max_nodes,
                RendezvousStoreInfo(address, where),
            )

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Nothing asks: nodes meet once."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return str(parameters.run_id)

        def shutdown(self) -> bool:
            self._store = None
            return True

    return Rendezvous()


def _listener(address: str, port: int, *, is_one_machine: bool) -> socket.socket | None:
    """Return a socket that listens where `address` is; None where that is no interface of this machine, and says so.

    A name that its own machine knows by a loopback address alone is another address to the others.
    """
    found = [
        (family, place)
        for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        if is_one_machine or address == "localhost" or not _is_loopback(place) or _is_loopback((address,))
    ]
    for family, place in found:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError:
            listener.close()
            if is_one_machine:
                raise
            continue
        listener.listen(2048)
        return listener
    print(
        f"booster run: {address} is no address of this machine's interfaces, so port {port} listens on all of them; give "
        "--master_addr the address of one to listen there alone",
        file=sys.stderr,
        flush=True,
    )
    return None


def _is_loopback(place: tuple[Any, ...]) -> bool:
    try:
        return ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False
