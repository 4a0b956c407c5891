"""The network interface for gloo where it would take the wrong one by itself.

gloo listens on the address of the host's own name. Debian and Ubuntu write that name into /etc/hosts as 127.0.1.1,
which other nodes cannot reach: the ranks would wait for each other until a time limit. NCCL looks at the interfaces
themselves and needs no help.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import MutableMapping, Sequence

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def choose_gloo_interface(hosts: Sequence[str], environ: MutableMapping[str, str]) -> str | None:
    """Set GLOO_SOCKET_IFNAME if the host's own name does not lead to an address that the others can reach.

    Args:
        hosts: of all ranks, this one among them; names or addresses.
        environ: changed; what it says already stands.

    Returns:
        The interface that was set; None where there is no need, or no other host is known by name.
    """
    if len(hosts) < 2 or VARIABLE in environ or not _is_loopback(_own_address()):
        return None
    for host in hosts:
        address = _address_towards(host)
        name = None if _is_loopback(address) else interface_of(address)
        if name is not None:
            environ[VARIABLE] = name
            return name
    return None


def interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _own_address() -> str:
    """What gloo would listen on; empty where the host's name leads nowhere."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _address_towards(host: str) -> str:
    """The address from which this machine would speak to a host; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
            unused.connect((host, _ANY_PORT))
            return str(unused.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.") or address == "::1"
