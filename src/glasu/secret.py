"""The secret of a party. numpy is not loaded here."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

SECRET_BYTES = 32


@dataclass(frozen=True)
class Secret:
    """Random bytes that only one party knows. `repr` omits the bytes, so that logs and errors do not show them."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.value) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(self.value)}")

    def derive(self, purpose: str, number: int = 0) -> Secret:
        """Return a secret for one purpose. It reveals neither this secret nor the secrets for other purposes."""
        info = b"glasu\0" + purpose.encode() + b"\0" + number.to_bytes(8, "little", signed=True)
        return Secret(hmac.digest(self.value, info, "sha256"))

    def commitment(self) -> str:
        """Return a value that is equal for equal secrets and does not reveal the secret, in hexadecimal."""
        return self.derive("commitment").value.hex()
