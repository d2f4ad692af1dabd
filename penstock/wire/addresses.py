"""Whose an address is. Pure."""

from __future__ import annotations

import ipaddress


def network_of(address: str) -> str:
    """Who counts as one client: the /64 of an IPv6 address, since one machine has all of it; else the address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return str(ipaddress.ip_network(f"{ip}/64", strict=False) if ip.version == 6 else ip)
