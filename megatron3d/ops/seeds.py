"""Derivation of all random seeds: a hash of the values that the random numbers depend on."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str | tuple[int, ...]) -> int:
    """Return a 63-bit seed: of (seed, name, tile) for initial values, of (seed, iteration, site) for dropout."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
