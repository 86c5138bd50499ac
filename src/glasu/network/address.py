"""Addresses of servers, host:port."""

from __future__ import annotations

from glasu.errors import ConfigError

HIGHEST_PORT = 65535


def check_address(address: str, option: str) -> str:
    """Check an address of the form host:port and return it. `option` is the command-line option, for errors."""
    scheme, slashes, _ = address.rpartition("://")
    if slashes:
        raise ConfigError(f"{option} {address}: give host:port without {scheme}://, for example localhost:9443.")
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdecimal()):
        raise ConfigError(f"{option} {address}: must be host:port, for example localhost:9443.")
    if int(port) > HIGHEST_PORT:
        raise ConfigError(f"{option} {address}: port {port} is above {HIGHEST_PORT}, the highest possible port.")
    return address


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; the brackets of an IPv6 address are removed."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
