"""The identity in a certificate. Its subject alternative name (SAN) names a party, or the server and its hosts.

The extended key usage states the role.

glasu:party:<name>   a party, its name percent-encoded; extended key usage: client
glasu:server         the server, with its DNS names and IP addresses; extended key usage: server
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from glasu.data.party_name import check_member_name
from glasu.errors import ConfigError, DataError

Role = Literal["server", "party"]
# The maximum number of parties of a run between machines. With this limit, the signed statements of all parties fit
# into one frame, even if all names have the maximum length.
MAX_PARTIES = 64
SERVER_NAME = "server"  # name of the server and of its folder
RESERVED = ("ca", SERVER_NAME, "retired")  # names of other folders in KITS, see glasu.pki.provision
USAGE: dict[Role, x509.ObjectIdentifier] = {
    "server": ExtendedKeyUsageOID.SERVER_AUTH,
    "party": ExtendedKeyUsageOID.CLIENT_AUTH,
}
_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)({_LABEL}\.)*(?![0-9]+\Z){_LABEL}")


def find_role(name: str) -> Role:
    """Return the role that belongs to a name. No party may be called "server"."""
    return "server" if name == SERVER_NAME else "party"


def make_identity_uri(name: str) -> str:
    """Return the URI for a name. Each name has exactly one URI."""
    return "glasu:server" if name == SERVER_NAME else f"glasu:party:{quote(name, safe='')}"


def read_name(uri: str) -> str | None:
    """Return the name for which `make_identity_uri` returns this URI; None if there is no such name."""
    name = SERVER_NAME if uri == "glasu:server" else unquote(uri.removeprefix("glasu:party:"))
    return name if uri == make_identity_uri(name) else None


def check_roster(names: Sequence[str]) -> None:
    """Refuse a roster (list of parties) that is empty or too long, or has an illegal, repeated or reserved name."""
    if not names:
        raise ConfigError("parties: name at least one, for example --parties a,b,c.")
    if len(names) > MAX_PARTIES:
        raise ConfigError(f"parties: {len(names)} are too many for one run; name at most {MAX_PARTIES}.")
    seen: dict[str, str] = {}
    for name in names:
        check_member_name(name)
        key = unicodedata.normalize("NFKC", name).casefold()  # some file systems treat names with the same key as equal
        if key in RESERVED:
            raise DataError(f"party {name!r}: the names {', '.join(RESERVED)} are reserved; use another name.")
        if key in seen:
            raise DataError(f"parties {seen[key]!r} and {name!r}: the names must differ by more than case; rename one.")
        seen[key] = name


def parse_hosts(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Convert the server's host names and IP addresses to the form for a certificate."""
    if not hosts:
        raise ConfigError("--host: name the host that the parties will connect to, for example --host localhost.")
    return [_parse_host(host) for host in dict.fromkeys(hosts)]


def _parse_host(host: str) -> x509.GeneralName:
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        if not _HOST.fullmatch(host.lower()):
            raise ConfigError(
                f"--host {host!r}: is neither a host name nor an IP address; give it without scheme, port or wildcard, "
                "for example glasu.example.org or 192.0.2.7."
            ) from None
        return x509.DNSName(host.lower())
    if address.is_unspecified or getattr(address, "scope_id", None):
        raise ConfigError(f"--host {host!r}: parties cannot connect to this address; give one that they can reach.")
    return x509.IPAddress(address)
