"""TLS 1.3 and nothing older: gRPC speaks TLS 1.2 too, and offers Python no switch for it."""

from __future__ import annotations

import os
import sys

_VARIABLE, _CIPHERS = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"


def require_tls_1_3() -> bool:
    """Leave gRPC no cipher that could serve a kit over TLS 1.2; tell whether it came in time.

    The variable lists ciphers of TLS 1.2 only, those of 1.3 are fixed. The one that stays needs an RSA key, and kits
    hold ECDSA keys. gRPC reads the variable once, when it is imported: call this before.
    """
    in_time = "grpc" not in sys.modules or os.environ.get(_VARIABLE) == _CIPHERS
    if in_time:
        os.environ[_VARIABLE] = _CIPHERS
    return in_time
