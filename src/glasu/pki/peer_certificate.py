"""Read the certificate that a server presents, without gRPC."""

from __future__ import annotations

import ssl
from socket import create_connection

from glasu.pki.certificate import read_certificate
from glasu.pki.kit import CERTIFICATE, KEY, Kit

TIMEOUT = 5.0  # seconds


def party_context(kit: Kit) -> ssl.SSLContext:
    """Return the TLS settings with which a party connects to its server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=kit.ca_pem.decode())
    context.load_cert_chain(kit.folder / CERTIFICATE, kit.folder / KEY)
    context.set_alpn_protocols(["h2"])
    return context


def read_server_hosts(kit: Kit, host: str, port: int) -> tuple[str, ...]:
    """Return the host names in the certificate of the server at an address; () unless the CA of the kit signed it."""
    try:
        context = party_context(kit)
        context.check_hostname = False
        with create_connection((host, port), TIMEOUT) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
            content = tls.getpeercert(binary_form=True) or b""
    except OSError:
        return ()
    server = read_certificate(ssl.DER_cert_to_PEM_cert(content).encode())
    return () if server is None else server.hosts
