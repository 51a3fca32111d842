"""Why a prompt's prefix was not cached: each reason, and the evictions behind it."""

import dataclasses

from coatcheck.proto.retention import Retention
from coatcheck.workers.core.cache_reasons import EvictionReason, MissReason, PrefixMiss, Tier, content_chain
from tests.workers.collector import Collector, request
from tests.workers.kv.two_tier_engine import ask, make_engine

PROMPT = list(range(1, 42))


def miss_of(done: Collector, name: str) -> PrefixMiss | None:
    """The miss in the request's first output."""
    return done.first[name, 0].miss


def test_what_nobody_has_asked_for_was_never_seen() -> None:
    """A new prompt misses at its first block, a longer one behind the part it shares, and a repeated one nowhere."""
    engine, _ = make_engine(64)
    assert miss_of(ask(engine, "first", PROMPT), "first") == PrefixMiss(0, MissReason.NEVER_SEEN)
    assert miss_of(ask(engine, "longer", PROMPT[:20] + [99] * 20), "longer") == PrefixMiss(5, MissReason.NEVER_SEEN)
    assert miss_of(ask(engine, "again", PROMPT), "again") is None
    assert miss_of(ask(engine, "short", [1, 2, 3]), "short") is None
    assert engine.stats().prefix_misses == {MissReason.NEVER_SEEN: 2}


def test_what_was_evicted_says_when_and_why() -> None:
    """Without a host tier the miss names the device, the reason and how long ago. Evictions are counted by reason."""
    engine, _ = make_engine(24, 0)
    ask(engine, "first", PROMPT)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    miss = miss_of(ask(engine, "again", PROMPT), "again")
    assert miss is not None and miss.evicted is not None
    assert (miss.reason, miss.evicted.tier) == (MissReason.EVICTED, Tier.DEVICE)
    assert miss.evicted.reason is EvictionReason.LOWEST_VALUE
    assert 0 < miss.seconds_ago < 10
    assert engine.stats().device_evictions[EvictionReason.LOWEST_VALUE] > 10


def test_what_left_the_host_too_names_the_host() -> None:
    """The miss names the last tier that held the block, which counts its own evictions."""
    engine, _ = make_engine(24, 12)
    ask(engine, "first", PROMPT)
    for i in range(12):
        ask(engine, f"flood{i}", [100 + i] * 80)
    miss = miss_of(ask(engine, "again", PROMPT), "again")
    assert miss is not None and miss.evicted is not None and miss.evicted.tier is Tier.HOST
    assert sum(engine.stats().host_evictions.values()) > 0


def test_a_prompt_said_to_be_unwanted_names_that() -> None:
    """A block evicted because its request said that it is unwanted is a miss of that reason."""
    engine, _ = make_engine(24, 0)
    engine.submit_request(dataclasses.replace(request("first", PROMPT, 4), retention=Retention(0)))
    Collector(engine).run()
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    miss = miss_of(ask(engine, "again", PROMPT), "again")
    assert miss is not None and miss.evicted is not None and miss.evicted.reason is EvictionReason.UNWANTED


def test_another_salts_tokens_are_told_apart_from_new_ones() -> None:
    """Another salt's prompt is a miss of reason OTHER_SALT; behind it, blocks new to both are NEVER_SEEN."""
    engine, _ = make_engine(64)
    ask(engine, "first", PROMPT, salt="a")
    assert miss_of(ask(engine, "other", PROMPT, salt="b"), "other") == PrefixMiss(0, MissReason.OTHER_SALT)
    longer = PROMPT[:40] + [99] * 20
    assert miss_of(ask(engine, "longer", longer, salt="b"), "longer") == PrefixMiss(10, MissReason.NEVER_SEEN)


def test_a_broken_block_is_named_as_such() -> None:
    """A block with a wrong checksum is the miss, though all before it were found."""
    engine, runner = make_engine()
    ask(engine, "first", PROMPT)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    runner.broken = {host_block for host_block, held in runner.host.items() if held[3] == tuple(PROMPT[:24])}
    assert miss_of(ask(engine, "again", PROMPT), "again") == PrefixMiss(5, MissReason.CORRUPT)
    assert engine.stats().prefix_misses[MissReason.CORRUPT] == 1


def test_what_is_sooner_computed_is_named_as_such() -> None:
    """If copies are slow, a block in the host tier is computed, and the miss says so."""
    engine, _ = make_engine()
    ask(engine, "first", PROMPT)
    for i in range(3):
        ask(engine, f"flood{i}", [100 + i] * 80)
    tiers = engine.scheduler.kv_cache
    tiers.copy_cost = dataclasses.replace(tiers.copy_cost, restore=1e6)
    assert miss_of(ask(engine, "again", PROMPT), "again") == PrefixMiss(0, MissReason.RECOMPUTED)


def test_contents_are_chains() -> None:
    """A block's content hash depends on its tokens and all before it. Only full blocks have one."""
    one, two = content_chain((1, 2, 3, 4, 5), 2), content_chain((9, 2, 3, 4), 2)
    assert len(one) == 2
    assert not set(one) & set(two)
    assert content_chain((1, 2, 3, 4), 2) == one
