"""Why a party has no connection to the server, as codes for programs and sentences for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ConnectionCode(enum.Enum):
    """Why a stream ended, or none could be opened."""

    NOTHING_LISTENS = "nothing_listens"
    UNKNOWN_NAME = "unknown_name"
    NOT_TLS = "not_tls"
    SERVER_EXPIRED = "server_expired"
    SERVER_NOT_YET_VALID = "server_not_yet_valid"
    SERVER_OF_OTHER_CA = "server_of_other_ca"
    SERVER_OF_OTHER_NAME = "server_of_other_name"
    OWN_CERTIFICATE_REJECTED = "own_certificate_rejected"  # it seems: a server that is stopping looks the same
    REFUSED = "refused"  # by the server, in words
    BUSY = "busy"  # this party has too many connections
    UNREADABLE_REVOCATIONS = "unreadable_revocations"
    NO_ANSWER = "no_answer"
    PING_TIMEOUT = "ping_timeout"
    CLOSED = "closed"  # without a reason
    OUT_OF_DESCRIPTORS = "out_of_descriptors"  # at this party
    ANOTHER_RUN = "another_run"
    OTHER = "other"

    @property
    def is_final(self) -> bool:
        """Return whether trying again cannot help."""
        return self in _FINAL

    @property
    def is_about_server(self) -> bool:
        """Return whether it is this party that does not accept the server."""
        return self in _ABOUT_SERVER


_C = ConnectionCode
_ABOUT_SERVER = {_C.SERVER_EXPIRED, _C.SERVER_NOT_YET_VALID, _C.SERVER_OF_OTHER_CA, _C.SERVER_OF_OTHER_NAME}
_FINAL = {*_ABOUT_SERVER, _C.REFUSED}


@dataclass(frozen=True)
class Disconnection:
    """The end of a stream."""

    code: ConnectionCode
    detail: str = ""  # what the server or gRPC said, for codes whose sentence needs it
    hosts: tuple[str, ...] = ()  # the names in the server's certificate, where they matter


@dataclass(frozen=True)
class Endpoint:
    """What the sentences say about the two ends."""

    address: str  # of the server, host:port
    ca_fingerprint: str  # of the party's kit

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")


SENTENCES: dict[ConnectionCode, str] = {
    _C.NOTHING_LISTENS: "nothing listens there",
    _C.UNKNOWN_NAME: "the name {host} cannot be resolved; check the spelling",
    _C.NOT_TLS: "what answers at {address} does not speak TLS; check the port",
    _C.SERVER_EXPIRED: "the server's certificate has expired; it needs a renewed kit",
    _C.SERVER_NOT_YET_VALID: "the server's certificate is not valid yet; set both clocks by NTP",
    _C.SERVER_OF_OTHER_CA: (
        "the server's certificate was not signed by the CA of this kit (CA fingerprint {ca_fingerprint}); compare it "
        "with ca_fingerprint in the server's kit.toml, and ask for a kit of the same `glasu provision`"
    ),
    _C.SERVER_OF_OTHER_NAME: (
        "the server's certificate does not name {host}; use a name in --server for which its kit was made with --host, "
        "or ask for `glasu provision --renew server --host {hosts}` (list all names: --host replaces them)"
    ),
    _C.OWN_CERTIFICATE_REJECTED: (
        "it closed the connection after the TLS handshake, as it does when it rejects a party's certificate; the "
        "server's standard error names the reason. Use a kit of the same `glasu provision` as the server's"
    ),
    _C.REFUSED: "{detail}",
    _C.BUSY: "{detail}",
    _C.UNREADABLE_REVOCATIONS: "its revocation list cannot be read at the moment",
    _C.NO_ANSWER: "it does not answer",
    _C.PING_TIMEOUT: "it answered no ping",
    _C.CLOSED: "it closed the connection; if this repeats, see the server's log",
    _C.OUT_OF_DESCRIPTORS: "this process has no free file descriptor",
    _C.ANOTHER_RUN: "it serves another run than {detail}, which this party belongs to",
    _C.OTHER: "{detail}",
}
ADVICE: dict[ConnectionCode, str] = {
    _C.UNKNOWN_NAME: "Give the right name in --server, or ask the people who run your DNS.",
    _C.NOT_TLS: "Give host and port of glasu serve in --server.",
    _C.UNREADABLE_REVOCATIONS: "Have revoked.pem restored in the server's kit, and start the same command again.",
    _C.ANOTHER_RUN: "Have the server started with the --out of that run, or take part in the new one with --fresh.",
    _C.OUT_OF_DESCRIPTORS: "Raise the limit (ulimit -n), and start the same command again.",
}
DEFAULT_ADVICE = "Start the server, and the same command again."


def describe(ended: Disconnection, end: Endpoint) -> str:
    """Return one sentence without a final period."""
    hosts = ",".join([*(ended.hosts or ["OTHERS"]), end.host])
    values = {"host": end.host, "address": end.address, "ca_fingerprint": end.ca_fingerprint, "hosts": hosts}
    return SENTENCES[ended.code].format(**values, detail=ended.detail.rstrip("."))


def describe_refusal(ended: Disconnection, end: Endpoint) -> str:
    """Return which side refuses the other, and the reason."""
    if ended.code.is_about_server:
        return f"this party does not accept the server at {end.address}: {describe(ended, end)}."
    return f"the server at {end.address} does not accept this party: {describe(ended, end)}."


def describe_absence(ended: Disconnection, end: Endpoint, seconds: float) -> str:
    """Return the message of a party that has waited for the server too long."""
    return (
        f"waited {seconds:.0f} s for the server at {end.address}: {describe(ended, end)}; saved work is kept. "
        f"{ADVICE.get(ended.code, DEFAULT_ADVICE)}"
    )
