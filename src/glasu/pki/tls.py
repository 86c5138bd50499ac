"""Require TLS 1.3. gRPC also accepts TLS 1.2 and has no option in Python to disable it."""

from __future__ import annotations

import os
import sys

_VARIABLE, _CIPHERS = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"


def require_tls_1_3() -> bool:
    """Configure gRPC so that no cipher of TLS 1.2 works with a kit; return False if grpc was imported before.

    The variable lists ciphers of TLS 1.2 only; those of TLS 1.3 are fixed. The remaining cipher needs an RSA key, and
    kits hold ECDSA keys. gRPC reads the variable once, when it is imported.
    """
    in_time = "grpc" not in sys.modules or os.environ.get(_VARIABLE) == _CIPHERS
    if in_time:
        os.environ[_VARIABLE] = _CIPHERS
    return in_time
