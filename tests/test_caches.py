"""Caches forget what is beyond their bound, and what is derived from a value is made once."""

from __future__ import annotations

from flexcp.caches import BoundedByBytes, Derived, Newest


def test_what_is_derived_is_made_once_for_each_kind():
    derived, made = Derived(), []

    def make():
        made.append(1)
        return {"a": 1}

    assert derived.once(dict, make) is derived.once(dict, make)
    assert derived.once(list, list) == []
    assert len(made) == 1


def test_derived_bytes_are_those_that_kept_objects_report():
    class Sized:
        nbytes = 12

    derived = Derived()
    derived.once(Sized, Sized)
    derived.once(list, lambda: [1, 2])
    assert derived.nbytes == 12


def test_the_newest_entries_are_kept():
    kept = Newest(most=3)
    for n in range(10):
        kept.add(n, -n)
    assert [kept.get(n) for n in range(10)] == [None] * 7 + [-7, -8, -9]


def test_what_was_used_longest_ago_goes_first():
    kept = BoundedByBytes(3, lambda key, value: value)
    for name in "abc":
        kept.add(name, 1)
    assert kept.get("a") == 1
    kept.add("d", 1)
    assert [kept.get(name) for name in "abcd"] == [1, None, 1, 1]
    assert kept.nbytes == 3


def test_entries_that_have_grown_make_room_for_others():
    kept = BoundedByBytes(10, lambda key, value: len(value))
    grows = [0]
    kept.add("grows", grows)
    kept.add("other", [0])
    grows.extend([0] * 20)
    kept.add("third", [0])
    assert [kept.get(name) is None for name in ("grows", "other", "third")] == [True, False, False]


def test_the_number_of_entries_is_bounded_too():
    kept = BoundedByBytes(10, lambda key, value: 0, most_entries=2)
    for n in range(5):
        kept.add(n, n + 1)
    assert [kept.get(n) for n in range(5)] == [None, None, None, 4, 5]


def test_the_value_that_was_kept_first_is_returned():
    kept = BoundedByBytes(10, lambda key, value: 1)
    first, second = [1], [1]
    assert kept.add("key", first) is first
    assert kept.add("key", second) is first
    kept.clear()
    assert kept.get("key") is None


class SlowKey:
    """A key that notes whether the cache was locked while its hash was worked out."""

    def __init__(self, cache, number):
        self.cache, self.number, self.known, self.locked = cache, number, False, []

    def __hash__(self):
        if not self.known:
            self.known = True
            self.locked.append(self.cache._lock.locked())
        return self.number

    def __eq__(self, other):
        return self.number == other.number


def test_sizes_and_hashes_are_worked_out_while_other_threads_may_use_the_cache():
    locked = []

    def size_of(key, value):
        locked.append(kept._lock.locked())
        return 1

    kept = BoundedByBytes(3, size_of)
    keys = [SlowKey(kept, n) for n in range(6)]
    for key in keys:
        assert kept.get(SlowKey(kept, key.number)) is None
        kept.add(key, key.number + 1)
    assert kept.nbytes == 3
    assert not any(locked)
    assert not any(locked for key in keys for locked in key.locked)
