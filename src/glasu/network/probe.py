"""Test the connection to the server step by step, without gRPC: DNS name, TCP, TLS and both certificates."""

from __future__ import annotations

import socket
import ssl

from glasu.files import OUT_OF_DESCRIPTORS
from glasu.network.address import split_address
from glasu.network.connection_codes import ConnectionCode, Disconnection
from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.kit import CERTIFICATE, KEY, Kit

SECONDS = 5.0  # timeout of each step
VERIFY_CODES = {  # OpenSSL's X509_V_ERR_*
    9: ConnectionCode.SERVER_NOT_YET_VALID,
    10: ConnectionCode.SERVER_EXPIRED,
    62: ConnectionCode.SERVER_OF_OTHER_NAME,
    64: ConnectionCode.SERVER_OF_OTHER_NAME,  # for an IP address
}


def probe(kit: Kit, address: str) -> CertificateInfo | Disconnection:
    """Connect once; return the certificate of a server that accepts this party, or the reason for the failure.

    With TLS 1.3, the handshake is complete at the party before the server checks the party's certificate. A server that
    accepts the certificate sends its HTTP/2 settings immediately. A server that rejects it closes the connection
    without an alert.
    """
    try:
        raw = socket.create_connection(split_address(address), SECONDS)
    except socket.gaierror:
        return Disconnection(ConnectionCode.UNKNOWN_NAME)
    except ConnectionRefusedError:
        return Disconnection(ConnectionCode.NOTHING_LISTENS)
    except OSError as error:
        exhausted = error.errno in OUT_OF_DESCRIPTORS
        return Disconnection(ConnectionCode.OUT_OF_DESCRIPTORS if exhausted else ConnectionCode.NO_ANSWER)
    try:
        with raw, _wrap(kit, address, raw) as tls:
            server = _read_certificate(tls)
            if not tls.recv(1):
                return Disconnection(ConnectionCode.OWN_CERTIFICATE_REJECTED)
    except ssl.SSLCertVerificationError as error:
        code = VERIFY_CODES.get(error.verify_code, ConnectionCode.SERVER_OF_OTHER_CA)
        is_known = code is ConnectionCode.SERVER_OF_OTHER_NAME  # True: the CA of this kit signed the certificate
        return Disconnection(code, hosts=_read_hosts(kit, address) if is_known else ())
    except OSError:
        return Disconnection(ConnectionCode.CLOSED)
    return server or Disconnection(ConnectionCode.NOT_TLS)


def _wrap(kit: Kit, address: str, raw: socket.socket, *, check_hostname: bool = True) -> ssl.SSLSocket:
    """Do the TLS handshake of a party."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = check_hostname
    context.load_verify_locations(cadata=kit.ca_pem.decode())
    context.load_cert_chain(kit.folder / CERTIFICATE, kit.folder / KEY)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(raw, server_hostname=split_address(address)[0])


def _read_certificate(tls: ssl.SSLSocket) -> CertificateInfo | None:
    return read_certificate(ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True) or b"").encode())


def _read_hosts(kit: Kit, address: str) -> tuple[str, ...]:
    """Return the host names in the certificate of the server; () unless the CA of the kit signed it."""
    try:
        raw = socket.create_connection(split_address(address), SECONDS)
        with raw, _wrap(kit, address, raw, check_hostname=False) as tls:
            server = _read_certificate(tls)
    except OSError:
        return ()
    return () if server is None else server.hosts
