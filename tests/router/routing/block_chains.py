"""Chains of block hashes for tests: one block per letter of a text, as `hash_chain` makes them of a prompt."""

from functools import cache

from hypothesis import strategies as st

from coatcheck.proto.block_hash import hash_chain

# Texts of few letters, so that many of them share a prefix.
CHAINS = st.text("ab", max_size=8)


@cache
def chain_of(text: str) -> list[bytes]:
    """The block hashes of a text. A block's hash covers the letters before it too."""
    return hash_chain(b"key", [ord(letter) for letter in text], 1)
