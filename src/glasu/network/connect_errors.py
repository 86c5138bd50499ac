"""Why a party cannot reach the server, in our words, and what to do: gRPC's are for those who wrote it."""

from __future__ import annotations

from glasu.pki.kit import Kit
from glasu.pki.peer_certificate import read_server_hosts

REFUSED = "refused: "  # waiting does not mend what begins so
UNKNOWN_NAME = "is not known here"
UNREADABLE = "its revocation list cannot be read at the moment"  # the server says so, and its log why
CERTIFICATE = "the server's certificate"
NO_TLS = "does not speak TLS"
ANOTHER_RUN = "it serves another run"


def plain_reason(said: str, code: str, kit: Kit, address: str) -> str:
    """Return why a stream ended.

    Args:
        said: by gRPC, or by the server.
        code: gRPC's status.
        kit: the party's.
        address: the server's, host:port.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    named = read_server_hosts(kit, host, int(port)) if "Hostname" in said else ()
    asked = ",".join([*(named or ["OTHERS"]), host])
    reasons = {
        "certificate has expired": f"{REFUSED}{CERTIFICATE} has expired; it needs a renewed kit",
        "certificate is not yet valid": f"{REFUSED}{CERTIFICATE} is not valid yet; set both clocks by NTP",
        "CERTIFICATE_VERIFY_FAILED": (
            f"{REFUSED}{CERTIFICATE} was not signed by the CA of this kit (CA fingerprint "
            f"{kit.ca_fingerprint}); compare it with ca_fingerprint in the server's kit.toml, and ask for a kit of the "
            "same `glasu provision`"
        ),
        "Hostname Verification": (
            f"{REFUSED}{CERTIFICATE} does not name {host}; give a name in --server for which its kit was made with "
            f"--host, or ask for `glasu provision --renew server --host {asked}` (all names, for --host replaces them)"
        ),
        "resolving": f"the name {host} {UNKNOWN_NAME}; check how it is spelt",
        "DNS": f"the name {host} {UNKNOWN_NAME}; check how it is spelt",
        "Domain name not found": f"the name {host} {UNKNOWN_NAME}; check how it is spelt",
        "WRONG_VERSION_NUMBER": f"what answers at {address} {NO_TLS}; check the port",
        "Connection refused": "nothing listens there",
        "Socket closed": "it closed the connection; if that goes on, its log says why",
    }
    if said.startswith(REFUSED) or said == UNREADABLE:
        return said.rstrip(".")
    return next((ours for theirs, ours in reasons.items() if theirs in said), f"{said} ({code})")


def advice(why: str) -> str:
    """Return what to do when the server could not be reached for this reason."""
    if UNKNOWN_NAME in why:
        return "Give the right name in --server, or ask whoever runs your DNS."
    if why == UNREADABLE:
        return "Have revoked.pem brought to the server's kit again, and start the same command."
    if NO_TLS in why:
        return "Give host and port of glasu serve in --server."
    if why.startswith(ANOTHER_RUN):
        return "Have the server started with the --out of that run; or take part in the new one, with --fresh."
    return "Start the server, and the same command again."


def refusal_told(address: str, why: str) -> str:
    """Return who does not accept whom, and why."""
    why = why.removeprefix(REFUSED)
    if CERTIFICATE in why:
        return f"this party does not accept the server at {address}: {why}."
    return f"the server at {address} does not accept this party: {why}."
