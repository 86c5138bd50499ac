"""The ways to hide tensors from the server: the choices of `privacy.secure_aggregation`.

Each way is an entry of SECURE_AGGREGATIONS. Other modules read attributes of the entry and never compare names. The
server and the settings use this table, so this module does not import torch, cryptography or TenSEAL at the top. Only
methods that clients call import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from glasu.ckks_parameters import CKKS
from glasu.wire.ciphertexts import Ciphertexts
from glasu.wire.ring import Ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from glasu.config import PrivacyConfig
    from glasu.privacy.masking import Hiding


class SecureAggregation:
    """A way to hide tensors from the server. This one hides nothing."""

    encoding: ClassVar[type[Ring] | None] = None  # the encoding of hidden tensors; None: nothing is hidden
    hides_sums: ClassVar[bool] = False  # whether sums are always hidden from the server, whatever the other settings
    has_secret_key: ClassVar[bool] = False  # whether the clients share a secret key, which the first client makes
    config_keys: ClassVar[tuple[str, ...]] = ()  # the keys of [privacy] that this choice reads
    extra: ClassVar[str] = ""  # the optional dependency group ("extra") that clients must install

    @property
    def hides_parts(self) -> bool:
        """Whether the server adds the parties' tensors without reading them. If so, it does not see scores either."""
        return self.encoding is not None

    def find_error(self, num_clients: int) -> str:
        """Return why sums over this number of clients would not be secret or exact, or an empty string."""
        return ""

    def load_package(self) -> None:
        """Import the package that a client needs; raise ConfigError with the command that installs it."""

    def name_protection(self, privacy: PrivacyConfig) -> str:
        """Return the name that the ledger records."""
        return "none"

    def make_secret(self) -> bytes | None:
        """Return a new secret key that all clients will share; None if this way does not use such a key."""
        return None

    def make_hiding(
        self, privacy: PrivacyConfig, pair_keys: Mapping[int, bytes], secret: bytes | None, **common: Any
    ) -> Hiding:
        """Return the object that hides the tensors of one client in one attempt.

        Args:
            privacy: the settings.
            pair_keys: the key that the client shares with each other client.
            secret: the secret key that all clients share; None if this way does not use such a key.
            common: the fields of `Hiding`.

        Raises:
            ValueError: the secret is not a key.
        """
        raise NotImplementedError


class _Masks(SecureAggregation):
    """Pairwise masks (`glasu.privacy.masking`)."""

    encoding = Ring
    config_keys = ("blind_server", "allow_two_parties", "range")

    def name_protection(self, privacy: PrivacyConfig) -> str:
        from glasu.privacy.masking import name_masks

        return name_masks(blind=privacy.blind_server)

    def make_hiding(
        self, privacy: PrivacyConfig, pair_keys: Mapping[int, bytes], secret: bytes | None, **common: Any
    ) -> Hiding:
        from glasu.privacy.masking import PairwiseMasks

        return PairwiseMasks(pair_keys=pair_keys, blind=privacy.blind_server, **common)


class _Encryption(SecureAggregation):
    """Encryption with CKKS (`glasu.privacy.encryption`)."""

    encoding = Ciphertexts
    hides_sums = True
    has_secret_key = True
    config_keys = ("allow_two_parties", "range")
    extra = "ckks"

    def find_error(self, num_clients: int) -> str:
        return CKKS.find_error(num_clients)

    def load_package(self) -> None:
        from glasu.privacy.encryption import load_tenseal

        load_tenseal()

    def name_protection(self, privacy: PrivacyConfig) -> str:
        from glasu.privacy.encryption import CKKS_NAME

        return CKKS_NAME

    def make_secret(self) -> bytes | None:
        from glasu.privacy.encryption import CkksCipher

        return CkksCipher().secret

    def make_hiding(
        self, privacy: PrivacyConfig, pair_keys: Mapping[int, bytes], secret: bytes | None, **common: Any
    ) -> Hiding:
        from glasu.privacy.encryption import CkksCipher, CkksEncryption

        assert secret is not None
        return CkksEncryption(cipher=CkksCipher(secret), **common)


SECURE_AGGREGATIONS: dict[str, SecureAggregation] = {
    "none": SecureAggregation(),
    "masks": _Masks(),
    "ckks": _Encryption(),
}


def find_secure_aggregation(privacy: PrivacyConfig) -> SecureAggregation:
    """Return the way in which the settings hide tensors from the server."""
    found: SecureAggregation = privacy.way_to_hide
    return found
