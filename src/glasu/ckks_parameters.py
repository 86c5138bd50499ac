"""The parameters of CKKS for `privacy.secure_aggregation = "ckks"`, and the number of parties that they allow.

A ciphertext is two polynomials with `degree` coefficients modulo `modulus`. It holds degree / 2 numbers of 32 bits.
Each number is multiplied by 2^scale_bits before it is encrypted. The last two numbers are a check value for the other
numbers (`glasu.privacy.encryption`). Decryption gives a number with an error below 1/2, so rounding gives the number
itself. The error has a bound that always holds, not only with high probability:

    parties * degree * (LARGEST_NOISE + 1/2) / 2^scale_bits       1/2: rounding of a coefficient
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBER_BITS = 32  # size of the numbers in a ciphertext, and of their sums
LARGEST_NOISE = 21  # SEAL draws the noise of a coefficient as a sum of 21 random bits minus another such sum
ALLOWED_ERROR = 1 / 8  # maximum error of a decrypted number; computing with floats adds a smaller error
CHECK_WORDS = 2  # how many numbers of a ciphertext hold the check value; each holds one of its two digits
CHECK_DIGIT_BITS = 24  # size of one of these digits
# Check values are computed modulo this prime, the greatest that fits into two digits. It must exceed 2^NUMBER_BITS.
CHECK_PRIME = 2**48 - 59
# degree -> the maximum sum of the primes' sizes in bits for 128 bits of security (homomorphicencryption.org, 2018)
SECURE_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438}


@dataclass(frozen=True)
class CkksParameters:
    """The sizes that define a ciphertext. `find_error` reports sizes with which sums are not secure or not exact."""

    degree: int = 4096
    modulus: int = 2**60 - 2**14 + 1  # the greatest prime of 60 bits that is 1 modulo 2 degree, as SEAL chooses it
    special_bits: int = 49  # size of a second prime, which TenSEAL needs to make keys
    scale_bits: int = 26

    @property
    def prime_bits(self) -> tuple[int, int]:
        """The sizes of both primes in bits."""
        return self.modulus.bit_length(), self.special_bits

    @property
    def key_bytes(self) -> int:
        """The size of a secret key in bytes: its coefficients modulo both primes."""
        return 2 * self.degree * 8

    @property
    def slots(self) -> int:
        """How many numbers a ciphertext holds."""
        return self.degree // 2

    @property
    def words(self) -> int:
        """How many tensor values a ciphertext holds: one per slot, except in the two slots of the check value."""
        return self.slots - CHECK_WORDS

    @property
    def most_clients(self) -> int:
        """The greatest number of ciphertexts that can be added.

        Their sum is decrypted exactly, and the sums of their check digits fit into 32 bits.
        """
        exact = int(2**self.scale_bits * ALLOWED_ERROR / (self.degree * (LARGEST_NOISE + 0.5)))
        return min(exact, 1 << (NUMBER_BITS - CHECK_DIGIT_BITS))

    def find_error(self, num_clients: int) -> str:
        """Return the reason why sums of this many clients would not be secret or exact, or an empty string."""
        if sum(self.prime_bits) > (most := SECURE_BITS.get(self.degree, 0)):
            return (
                f"primes of {sum(self.prime_bits)} bits exceed the {most} bits that are secure at degree {self.degree}"
            )
        if NUMBER_BITS + self.scale_bits + 1 >= self.modulus.bit_length():
            return f"numbers of {NUMBER_BITS} bits with a scale of {self.scale_bits} bits do not fit into the modulus"
        if num_clients > self.most_clients:
            return f"sums are exact for at most {self.most_clients} parties"
        return ""


CKKS = CkksParameters()
