"""Counts, bytes and the hash of the collectives that a rank issues."""

from __future__ import annotations

import pytest

from zeroweave.comm.ledger import Ledger, Traffic


@pytest.mark.oldest
def test_bytes_per_kind() -> None:
    ledger = Ledger(world=4, rank=1)
    ledger.record("all_gather", 0, "bfloat16", 4096)
    ledger.record("all_gather", 1, "bfloat16", 1024)
    ledger.record("reduce_scatter", 1, "float32", 2048)
    ledger.record("all_reduce", -1, "float32", 512)
    assert ledger.totals() == {
        "all_gather": Traffic(calls=2, payload=5120, wire=3840),
        "reduce_scatter": Traffic(calls=1, payload=2048, wire=1536),
        "all_reduce": Traffic(calls=1, payload=512, wire=768),
    }
    assert ledger.count == 4


def test_a_step_is_what_came_since_it_began() -> None:
    ledger = Ledger(world=2, rank=0)
    ledger.record("all_gather", 0, "float32", 1024)
    ledger.record("broadcast", 0, "float32", 1024)
    assert ledger.step()["all_gather"].calls == 1
    ledger.begin_step()
    assert ledger.step() == {}
    ledger.record("all_gather", 0, "float32", 256)
    assert ledger.step() == {"all_gather": Traffic(1, 256, 128)}
    assert ledger.totals()["all_gather"] == Traffic(2, 1280, 640)


def test_a_world_of_one_sends_nothing() -> None:
    ledger = Ledger(world=1, rank=0)
    ledger.record("all_reduce", 0, "float32", 1024)
    assert ledger.totals() == {"all_reduce": Traffic(1, 1024, 0)}


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError):
        Ledger(2, 0).record("gossip", 0, "float32", 1024)


def test_of_an_all_to_all_a_rank_sends_what_is_not_its_own() -> None:
    """In three ranks, 9 messages of 100 bytes each, of which each rank sends two to others."""
    ledger = Ledger(world=3, rank=0)
    ledger.record("all_to_all", 0, "uint8", 900)
    assert ledger.totals() == {"all_to_all": Traffic(1, 900, 200)}


@pytest.mark.oldest
def test_equal_sequences_have_equal_hashes_on_all_ranks() -> None:
    first, second = Ledger(2, 0), Ledger(2, 1)
    for ledger in (first, second):
        ledger.record("all_gather", 0, "float32", 1024)
        ledger.record("all_gather", 1, "float32", 1024)
    assert first.hash == second.hash == first.hash
    assert 0 <= first.hash < 2**64


@pytest.mark.parametrize(
    "other",
    [
        ("reduce_scatter", 0, "float32", 1024, "world"),
        ("all_gather", 1, "float32", 1024, "world"),
        ("all_gather", 0, "bfloat16", 1024, "world"),
        ("all_gather", 0, "float32", 2048, "world"),
        ("all_gather", 0, "float32", 1024, "experts"),
    ],
)
def test_every_property_of_a_collective_is_in_the_hash(other: tuple[str, int, str, int, str]) -> None:
    first, second = Ledger(2, 0), Ledger(2, 1)
    first.record("all_gather", 0, "float32", 1024)
    second.record(*other)
    assert first.hash != second.hash


def test_the_order_is_in_the_hash() -> None:
    first, second = Ledger(2, 0), Ledger(2, 1)
    for bucket in (0, 1):
        first.record("all_gather", bucket, "float32", 1024)
        second.record("all_gather", 1 - bucket, "float32", 1024)
    assert first.count == second.count and first.hash != second.hash


def test_the_trail_tells_the_hash_after_each_collective() -> None:
    ledger, other = Ledger(2, 0), Ledger(2, 1)
    for bucket in (0, 1, 2):
        ledger.record("all_gather", bucket, "float32", 64)
    for bucket in (0, 2):
        other.record("all_gather", bucket, "float32", 64)
    assert ledger.mark == (3, ledger.hash)
    assert ledger.hash_at(0) == other.hash_at(0)
    assert ledger.hash_at(1) == other.hash_at(1)
    assert ledger.hash_at(2) != other.hash_at(2)
    assert ledger.hash_at(4) is None and ledger.hash_at(-1) is None
    assert [ledger.issued_at(count) for count in (1, 2)] == list(ledger.marks[1:3])
    assert ledger.issued_at(ledger.count + 1) is None and ledger.issued_at(-1) is None


def test_collectives_are_told_in_words_by_the_names_of_buckets() -> None:
    ledger = Ledger(2, 0, {0: "blocks.0"})
    ledger.record("all_gather", 0, "float32", 64)
    ledger.record("reduce_scatter", 1, "bfloat16", 32)
    ledger.record("broadcast", -1, "uint8", 1)
    texts = ["all_gather blocks.0, 64 bytes of float32", "reduce_scatter bucket 1, 32 bytes of bfloat16"]
    texts += ["broadcast, 1 bytes of uint8"]
    assert ledger.texts(0) == texts and ledger.texts(2) == texts[2:] and ledger.texts(3) == []
    assert [ledger.text_at(count) for count in range(5)] == ["", *texts, ""]
    other = Ledger(2, 1)
    other.record("all_gather", 0, "float32", 64)
    assert ledger.hash_at(1) == other.hash_at(1)  # names are for people only
