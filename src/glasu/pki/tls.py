"""Require TLS 1.3. gRPC also accepts TLS 1.2 and has no option in Python to disable it."""

from __future__ import annotations

import os
import sys

_VARIABLE, _CIPHERS = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"


def require_tls_1_3() -> bool:
    """Configure gRPC so that no cipher of TLS 1.2 works with a kit; return False if grpc was imported before.

    The environment variable GRPC_SSL_CIPHER_SUITES lists the allowed ciphers of TLS 1.2; it does not affect TLS 1.3.
    The only cipher in the list requires an RSA key, but kits contain ECDSA keys. gRPC reads the variable once, when
    grpc is imported.
    """
    in_time = "grpc" not in sys.modules or os.environ.get(_VARIABLE) == _CIPHERS
    if in_time:
        os.environ[_VARIABLE] = _CIPHERS
    return in_time
