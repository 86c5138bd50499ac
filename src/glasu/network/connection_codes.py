"""Reasons why a party has no connection to the server: codes for programs, sentences for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from glasu.network.address import split_address


class ConnectionCode(enum.Enum):
    """Why a stream ended or could not be opened."""

    NOTHING_LISTENS = "nothing_listens"
    UNKNOWN_NAME = "unknown_name"
    NOT_TLS = "not_tls"
    SERVER_EXPIRED = "server_expired"
    SERVER_NOT_YET_VALID = "server_not_yet_valid"
    SERVER_OF_OTHER_CA = "server_of_other_ca"
    SERVER_OF_OTHER_NAME = "server_of_other_name"
    SERVER_OF_OTHER_KEY = "server_of_other_key"  # the server's key differs from the key that the party pins
    OWN_CERTIFICATE_REJECTED = "own_certificate_rejected"  # not certain: a server that is stopping looks the same
    REFUSED = "refused"  # the server refused the party and sent the reason
    BUSY = "busy"  # the server has too many connections of this party
    UNREADABLE_REVOCATIONS = "unreadable_revocations"
    NO_ANSWER = "no_answer"
    PING_TIMEOUT = "ping_timeout"
    CLOSED = "closed"  # the server closed the connection without a reason
    OUT_OF_DESCRIPTORS = "out_of_descriptors"  # this party has no free file descriptor
    ANOTHER_RUN = "another_run"
    OTHER = "other"

    @property
    def is_final(self) -> bool:
        """Whether another attempt to connect is useless."""
        return self in _FINAL


_C = ConnectionCode
_FINAL = {
    _C.SERVER_EXPIRED,
    _C.SERVER_NOT_YET_VALID,
    _C.SERVER_OF_OTHER_CA,
    _C.SERVER_OF_OTHER_NAME,
    _C.SERVER_OF_OTHER_KEY,
    _C.REFUSED,
}


@dataclass(frozen=True)
class Disconnection:
    """The end of a stream."""

    code: ConnectionCode
    detail: str = ""  # text from the server or gRPC; some sentences contain it
    hosts: tuple[str, ...] = ()  # the names in the server's certificate; some sentences contain them


SENTENCES: dict[ConnectionCode, str] = {
    _C.NOTHING_LISTENS: "nothing listens there",
    _C.UNKNOWN_NAME: "the name {host} cannot be resolved; check the spelling",
    _C.NOT_TLS: "the service at {address} does not use TLS; check the port",
    _C.SERVER_EXPIRED: "the server's certificate has expired; the server needs a renewed kit",
    _C.SERVER_NOT_YET_VALID: "the server's certificate is not valid yet; set both clocks by NTP",
    _C.SERVER_OF_OTHER_CA: (
        "the server's certificate was not signed by the CA of this kit (CA fingerprint {ca_fingerprint}); compare it "
        "with ca_fingerprint in the server's kit.toml, and ask for a kit of the same `glasu provision`"
    ),
    _C.SERVER_OF_OTHER_NAME: (
        "the server's certificate does not name {host}; give --server a name that the certificate contains, or ask "
        "for `glasu provision --renew server --host {hosts}` (list all names: --host replaces the earlier names)"
    ),
    _C.SERVER_OF_OTHER_KEY: "{detail}; compare the fingerprints over the telephone before you change the pin",
    _C.OWN_CERTIFICATE_REJECTED: (
        "it closed the connection after the TLS handshake, so it has probably rejected this party's certificate; use a "
        "kit of the same `glasu provision` as the server's kit. With GRPC_VERBOSITY=INFO, glasu serve prints the reason"
    ),
    _C.REFUSED: "{detail}",
    _C.BUSY: "{detail}",
    _C.UNREADABLE_REVOCATIONS: "its revocation list cannot be read at the moment",
    _C.NO_ANSWER: "it does not answer",
    _C.PING_TIMEOUT: "it did not answer a ping",
    _C.CLOSED: "it closed the connection; if this repeats, see the server's log",
    _C.OUT_OF_DESCRIPTORS: "this process has no free file descriptor",
    _C.ANOTHER_RUN: "it does not serve run {detail}, which this party has joined",
    _C.OTHER: "{detail}",
}
ADVICE: dict[ConnectionCode, str] = {
    _C.UNKNOWN_NAME: "Give the correct name in --server, or ask your DNS administrator.",
    _C.NOT_TLS: "Give host and port of glasu serve in --server.",
    _C.UNREADABLE_REVOCATIONS: "Ask the server's operator to restore revoked.pem, then run the same command again.",
    _C.ANOTHER_RUN: "Start the server with the --out of that run, or join the new run with --fresh.",
    _C.OUT_OF_DESCRIPTORS: "Raise the limit (ulimit -n), then run the same command again.",
}
DEFAULT_ADVICE = "Start the server, then run the same command again."


def describe_end(ended: Disconnection, address: str, ca_fingerprint: str) -> str:
    """Describe the end of a stream in one sentence without a final period.

    Args:
        ended: the end of the stream.
        address: the address of the server, host:port.
        ca_fingerprint: the CA fingerprint of the party's kit.
    """
    host, _ = split_address(address)
    hosts = ",".join([*(ended.hosts or ["OTHERS"]), host])
    values = {"host": host, "address": address, "ca_fingerprint": ca_fingerprint, "hosts": hosts}
    return SENTENCES[ended.code].format(**values, detail=ended.detail.rstrip("."))
