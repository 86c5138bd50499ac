"""What one machine can look at by itself: its kit, its disk, the way to the server, its clock; no torch here."""

from __future__ import annotations

import shutil
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from glasu.errors import TransportError
from glasu.network.doctor.findings import Finding, Level
from glasu.pki.certificate import CertificateInfo, read_certificate
from glasu.pki.identity import Role
from glasu.pki.kit import Kit, open_kit, pem
from glasu.pki.peer_certificate import party_context
from glasu.runtime.output_dir import JOINING, SERVING

EXPIRES_SOON = timedelta(days=30)
CLOCK_DIFFERS, CLOCK_IS_WRONG = 10.0, 300.0  # seconds; certificates are valid from 5 minutes before they are made
PATIENCE = 5.0  # seconds for one connection


def kit_findings(folder: Path, role: Role, now: datetime) -> tuple[Kit | None, list[Finding]]:
    """Open a kit and tell how long it is valid; None where it cannot be used."""
    try:
        kit = open_kit(folder, role, now=now)
    except TransportError as error:
        return None, [Finding("certificate", "bad", "its kit cannot be used; it says there why", str(error))]
    bearer = f"the server at {', '.join(kit.hosts)}" if kit.role == "server" else f"party {kit.name}"
    return kit, [_validity("certificate", f"of {bearer}", kit.expires, now)]


def _validity(check: str, whose: str, expires: datetime, now: datetime) -> Finding:
    left = expires - now
    if left > EXPIRES_SOON:
        return Finding(check, "good", f"{whose}, valid until {expires:%Y-%m-%d}")
    return Finding(
        check, "warning", f"{whose}, expires on {expires:%Y-%m-%d}, in {left.days} days; ask for a renewed kit soon"
    )


def disk_finding(out: Path, needed: int) -> Finding:
    """Tell whether checkpoints and results have room."""
    free = shutil.disk_usage(out).free
    level: Level = "good" if free >= needed else "bad"
    is_tied = any((out / name).is_file() for name in (SERVING, JOINING))  # to the run that goes on there
    advice = "" if level == "good" else "; make room" if is_tied else "; make room, or choose another --out"
    return Finding("disk", level, f"{_size(free)} free, checkpoints and results need {_size(needed)}{advice}")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def clock_finding(difference: float, uncertainty: float) -> Finding:
    """Judge by how many seconds a party's clock is ahead of the server's."""
    off = max(0.0, abs(difference) - uncertainty)
    level: Level = "good" if off <= CLOCK_DIFFERS else "warning" if off <= CLOCK_IS_WRONG else "bad"
    advice = "" if level == "good" else "; set both by NTP, or certificates will count as expired or not valid yet"
    way = "ahead of" if difference > 0 else "behind"
    return Finding("clock", level, f"{abs(difference):.1f} s {way} the server's{advice}")


def road_finding(kit: Kit, address: str, now: datetime) -> tuple[Finding, bool]:
    """Try the way to the server step by step: its name, a connection, TLS and the certificates.

    Returns:
        What was found, and whether waiting may help: the server may not have been started yet.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        raw = socket.create_connection((host, int(port)), PATIENCE)
    except socket.gaierror:
        return Finding("server", "bad", f"the name {host} is not known here; is it spelt right? Ask your DNS"), False
    except OSError as error:
        why = "nothing answers in time" if isinstance(error, TimeoutError) else (error.strerror or "no connection")
        said = f"no connection to {address} ({why.lower()}); is the server started, and the port open in all firewalls?"
        return Finding("server", "bad", said), True
    with raw:
        try:
            with party_context(kit).wrap_socket(raw, server_hostname=host) as tls:
                server = read_certificate(_as_pem(tls.getpeercert(binary_form=True) or b""))
                if not tls.recv(1):  # in TLS 1.3 a server looks at our certificate after we have finished
                    raise ConnectionResetError(None, "it ended the connection")
        except ssl.SSLCertVerificationError as error:
            why = error.verify_message.rstrip(".").lower()
            advice = f"was its kit made with --host {host}, and by the CA of this kit?"
            return Finding("server", "bad", f"its certificate does not fit {host}: {why}; {advice}"), False
        except OSError as error:
            said = f"the TLS handshake failed ({error.strerror or type(error).__name__}); the server's log says why"
            return Finding("server", "bad", said), False
    return _met(address, server, now), False


def _met(address: str, server: CertificateInfo | None, now: datetime) -> Finding:
    if server is None or server.role != "server":
        return Finding("server", "bad", f"what answers at {address} is not a server of GLASU")
    whose = f"reached at {address}; its certificate is of {', '.join(server.hosts)}"
    return _validity("server", whose, server.expires, now)


def _as_pem(der: bytes) -> bytes:
    return pem(x509.load_der_x509_certificate(der))


def present() -> datetime:
    """Return the time by this machine's clock."""
    return datetime.now(UTC)
