"""The hash of a KV block. Routers and workers of every version must compute the same one."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.proto.block_hash import HASH_BYTES, block_key, hash_block, hash_chain

KEY = block_key(salt="", model="demo", fingerprint="0123")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def test_known_vectors() -> None:
    """The hashes of these blocks never change between versions."""
    assert KEY.hex() == "6fad2bed02dbfd3a4b44db775903e713111be896f7dae3ecb7af03c5312cbf68"
    chain = hash_chain(KEY, list(range(9)), block_size=4)
    assert [name.hex() for name in chain] == [
        "12554a141be57c34420c8a0ca0dfee23",
        "595ac7976330869d58c91635908bc99a",
    ]


def test_rule_as_written() -> None:
    """A hash is blake2b over the parent and the tokens as little-endian uint32, with the key of the chain."""
    key = hashlib.blake2b(digest_size=32)
    for field in (b"salt", b"model", b"print", b""):
        key.update(struct.pack("<Q", len(field)) + field)
    assert block_key(salt="salt", model="model", fingerprint="print") == key.digest()
    packed = struct.pack("<3I", 1, 2**31, 2**32 - 1)
    expected = hashlib.blake2b(b"p" * 16 + packed, digest_size=16, key=key.digest()).digest()
    assert hash_block(key.digest(), b"p" * 16, [1, 2**31, 2**32 - 1]) == expected


@given(tokens=tokens, block_size=st.integers(1, 40))
def test_a_chain_hashes_full_blocks(tokens: list[int], block_size: int) -> None:
    """A chain has one hash for each full block, computed from its parent and its tokens only."""
    chain = hash_chain(KEY, tokens, block_size)
    assert len(chain) == len(tokens) // block_size
    parent = b""
    for index, name in enumerate(chain):
        assert len(name) == HASH_BYTES
        assert name == hash_block(KEY, parent, tokens[index * block_size : (index + 1) * block_size])
        parent = name


@given(prefix=tokens, suffix=tokens, block_size=st.integers(1, 16))
def test_a_shared_prefix_shares_hashes(prefix: list[int], suffix: list[int], block_size: int) -> None:
    """The tokens after a prefix do not change the hashes of its full blocks."""
    chain = hash_chain(KEY, prefix, block_size)
    assert hash_chain(KEY, prefix + suffix, block_size)[: len(chain)] == chain


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), data=st.data())
def test_one_token_changes_all_that_follows(tokens: list[int], data: st.DataObject) -> None:
    """Changing a token changes the hash of its block and of all later blocks, but of no earlier one."""
    place = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = list(tokens)
    changed[place] = (changed[place] + 1) % 2**32
    before, after = hash_chain(KEY, tokens, 4), hash_chain(KEY, changed, 4)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [index < place // 4 for index in range(len(same))]


def test_chain_goes_on_from_a_parent() -> None:
    """A chain can be continued from its last hash without the earlier tokens."""
    whole = hash_chain(KEY, list(range(64)), 16)
    assert hash_chain(KEY, list(range(32, 64)), 16, parent=whole[1]) == whole[2:]


@pytest.mark.parametrize("field", ["salt", "model", "fingerprint"])
def test_tenants_are_apart(field: str) -> None:
    """Chains of different salts, models or fingerprints share no hash, so no tenant can probe the cache of another."""
    same = {"salt": "a", "model": "m", "fingerprint": "f"}
    mine = hash_chain(block_key(**same), list(range(64)), 16)
    other = hash_chain(block_key(**{**same, field: "other"}), list(range(64)), 16)
    assert not set(mine) & set(other)


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_fields_do_not_run_together(a: str, b: str, c: str, d: str) -> None:
    """Moving characters from one field of the key to the next gives another key."""
    if (a, b) != (c, d):
        assert block_key(salt=a, model=b, fingerprint="") != block_key(salt=c, model=d, fingerprint="")


@pytest.mark.parametrize("bad", [[-1], [2**32]])
def test_ids_outside_uint32_are_refused(bad: list[int]) -> None:
    """A token id that does not fit into 32 bits is an error and is never wrapped."""
    with pytest.raises(OverflowError):
        hash_block(KEY, b"", bad)
