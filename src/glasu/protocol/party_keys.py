"""The keys of one client, for its random draws, its noise and its signatures."""

from __future__ import annotations

from dataclasses import dataclass, field

from glasu.errors import ProtocolError
from glasu.privacy.masking import KEY_SIZE, Signer
from glasu.privacy.noise import derive_noise_key
from glasu.secret import Secret


@dataclass
class PartyKeys:
    """The keys of one client. Without a secret they are derived from the seed, which is public."""

    party: str
    seed: int  # `train.seed`
    secret: Secret | None = field(default=None, repr=False)
    signer: Signer | None = None  # signs the keys of this party; None in one process
    # All clients have this key; the server does not have it. None in runs without keys, or before the key agreement.
    run_key: Secret | None = field(default=None, repr=False)

    @property
    def private_seed(self) -> int | Secret:
        """The seed of initial weights, dropout masks, neighbours and rounding."""
        return self.seed if self.secret is None else self.secret.derive("training", self.seed)

    @property
    def classifier_seed(self) -> int | Secret:
        """The seed of the common classifier of a warm start: the run key, once the clients have agreed on it.

        Without secrets the run key would be derived from the public seed. In this case, the seed itself is returned.
        """
        return self.seed if self.secret is None or self.run_key is None else self.run_key

    def derive_noise_key(self) -> bytes:
        """Return the key of the noise in released rows."""
        return derive_noise_key(self.secret, self.seed)

    def derive_label_key(self) -> bytes:
        """Return the key of randomised response."""
        return derive_noise_key(None if self.secret is None else self.secret.derive("labels"), self.seed)

    def derive_run_key(self) -> Secret:
        """Return the run key that this client sends if it is the first client."""
        seed = self.private_seed
        own = seed if isinstance(seed, Secret) else Secret(seed.to_bytes(KEY_SIZE, "little"))
        return own.derive("run key")

    def adopt_run_key(self, key: Secret) -> None:
        """Store the run key; refuse a different one."""
        if self.run_key not in (None, key):
            raise ProtocolError(f"party {self.party!r}: the run key has changed; did the first party lose its secret?")
        self.run_key = key
