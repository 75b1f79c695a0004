"""The pool's rules: never above a limit, one grant for each ask, oldest first, and nobody forgotten."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shardmill.fleet.pool import Ask, Grant, Pool

SERVERS = ["a", "b", "c"]
CLIENTS = ["j1", "j2", "j3"]


def pool_of(**caps: int | None) -> Pool:
    pool = Pool()
    for name, cap in caps.items():
        pool.open(name, cap)
    return pool


def ask_many(pool: Pool, count: int, client: str = "j", order: int = 0, limit: int = 48, first: int = 0) -> list[Grant]:
    for number in range(first, first + count):
        pool.ask(Ask(client, number, order, limit))
    return pool.grants()


def outstanding(pool: Pool) -> dict[str, int]:
    return {name: len(slot.outstanding) for name, slot in pool.slots.items()}


def test_seven_jobs_never_send_a_server_more_than_its_limit() -> None:
    pool = pool_of(**{f"gpu{i}": 48 for i in range(7)})
    for job in range(7):
        ask_many(pool, 500, client=f"j{job}", order=job)
    assert set(outstanding(pool).values()) == {48}  # generate.concurrency, over all jobs


def test_least_outstanding_first() -> None:
    pool = pool_of(a=16, b=16, c=16)
    ask_many(pool, 9)
    assert set(outstanding(pool).values()) == {3}
    for number in [key[1] for key in list(pool.slots["b"].outstanding)]:
        pool.release(("j", number))
    assert {grant.server for grant in ask_many(pool, 3, first=100)} == {"b"}


def test_oldest_shard_first_and_first_come_within() -> None:
    pool = pool_of(a=1)
    ask_many(pool, 1, client="old", order=9)
    ask_many(pool, 2, client="new", order=5)
    ask_many(pool, 2, client="older", order=3)
    served = []
    busy = ("old", 0)
    for _ in range(4):
        pool.release(busy)
        (grant,) = pool.grants()
        busy = grant.ask.key
        served.append(busy)
    assert served == [("older", 0), ("older", 1), ("new", 0), ("new", 1)]


def test_margin_only_while_there_is_plenty_of_work() -> None:
    pool = pool_of(a=16, b=16)
    ask_many(pool, 500)
    assert outstanding(pool) == {"a": 18, "b": 18}
    pool = pool_of(a=16, b=16)
    ask_many(pool, 34)
    assert outstanding(pool) == {"a": 16, "b": 16}, "at the end of a build no server queues while another idles"


def test_avoided_server_only_where_there_is_no_other() -> None:
    pool = pool_of(a=1, b=1)
    pool.ask(Ask("j", 1, 0, 48, avoid=frozenset({"a"})))
    pool.ask(Ask("j", 2, 0, 48, avoid=frozenset({"a"})))
    assert [grant.server for grant in pool.grants()] == ["b"]
    pool.ask(Ask("j", 3, 0, 48))
    assert [(grant.ask.number, grant.server) for grant in pool.grants()] == [(3, "a")], "one that waits blocks nobody"
    pool.release(("j", 3))
    pool.close("b")
    assert [grant.server for grant in pool.grants()] == ["a"]


def test_alone_gets_a_server_emptied_and_keeps_it_empty() -> None:
    pool = pool_of(a=4)
    ask_many(pool, 2)
    pool.ask(Ask("j", 10, 0, 48, alone=True))
    pool.ask(Ask("j", 11, 0, 48))
    assert pool.grants() == []
    pool.release(("j", 0))
    assert pool.grants() == []
    pool.release(("j", 1))
    assert [grant.ask.number for grant in pool.grants()] == [10]
    assert pool.grants() == []
    pool.release(("j", 10))
    assert [grant.ask.number for grant in pool.grants()] == [11]


def test_alone_moves_on_when_its_server_leaves() -> None:
    pool = pool_of(a=4, b=4)
    ask_many(pool, 3)  # two at one of them
    pool.ask(Ask("j", 10, 0, 48, alone=True))
    assert pool.grants() == []
    reserved = next(name for name, slot in pool.slots.items() if slot.reserved)
    pool.close(reserved)
    assert pool.grants() == []
    for number in range(3):
        pool.release(("j", number))
    (grant,) = pool.grants()
    assert grant.ask.number == 10 and grant.server != reserved


def test_alone_is_not_lost_with_the_job() -> None:
    pool = pool_of(a=4)
    ask_many(pool, 1)
    pool.ask(Ask("gone", 1, 0, 48, alone=True))
    pool.grants()
    pool.drop("gone")
    assert [grant.ask.number for grant in ask_many(pool, 1, first=5)] == [5]


def test_full_queue_lowers_the_limit_and_answers_raise_it_again() -> None:
    pool = pool_of(a=8)
    ask_many(pool, 8)
    for number in range(4):
        pool.full("a")
        pool.release(("j", number))
    assert ask_many(pool, 4, first=20) == []
    pool.resume("a")
    assert pool.grants() == []
    pool.well("a")
    pool.well("a")
    assert len(pool.grants()) == 2


def test_full_server_is_left_alone_until_it_is_resumed() -> None:
    pool = pool_of(a=8)
    ask_many(pool, 8)
    pool.full("a")
    for number in range(3):
        pool.release(("j", number))
    assert ask_many(pool, 1, first=20) == []
    pool.resume("a")
    assert len(pool.grants()) == 1


def test_asking_twice_under_one_number_is_a_mistake() -> None:
    pool = pool_of(a=1)
    ask_many(pool, 1)
    with pytest.raises(ValueError, match="twice"):
        ask_many(pool, 1)


def test_leases_of_a_fleet_before_count() -> None:
    pool = Pool()
    pool.adopt(("j", 1), "a")
    pool.adopt(("j", 2), "a")
    pool.open("a", 2)
    assert ask_many(pool, 1, first=3) == []
    pool.release(("j", 1))
    assert len(pool.grants()) == 1


def test_a_long_queue_of_those_who_avoid_costs_others_nothing() -> None:
    """Everyone gets through when each server fails for somebody."""
    pool = pool_of(a=2, b=2)
    chooser = random.Random(1)
    waiting = 200
    for number in range(waiting):
        pool.ask(Ask("j", number, 0, 48, avoid=frozenset(chooser.choice([["a"], ["b"], ["a", "b"]]))))
    done = 0
    held = [grant.ask.key for grant in pool.grants()]
    while held:
        pool.release(held.pop(0))
        done += 1
        held += [grant.ask.key for grant in pool.grants()]
    assert done == waiting


class PoolMachine(RuleBasedStateMachine):
    """Any order of events: the pool agrees with a plain account of what was asked, granted, ended and taken back."""

    @initialize()
    def begin(self) -> None:
        self.pool = Pool()
        self.waiting: dict[tuple[str, int], Ask] = {}
        self.held: dict[tuple[str, int], str] = {}
        self.caps: dict[str, int | None] = {}
        self.number = 0
        self.alone_at: dict[tuple[str, int], str] = {}

    def settle(self) -> None:
        """Takes the grants, and checks each against what was known before it."""
        for grant in self.pool.grants():
            key = grant.ask.key
            assert key in self.waiting, "granted twice, or never asked"
            asked = self.waiting.pop(key)
            assert grant.server in self.caps, "a closed server"
            others = [name for name in self.caps if name not in asked.avoid]
            assert grant.server not in asked.avoid or not others
            assert grant.server not in self.alone_at.values()
            self.held[key] = grant.server
            if asked.alone:
                assert list(self.held.values()).count(grant.server) == 1
                self.alone_at[key] = grant.server
            else:
                older = [a for a in self.waiting.values() if not a.alone and a.order < asked.order]
                assert not any(
                    a.limit >= asked.limit and (grant.server not in a.avoid or not self.choices(a)) for a in older
                ), "an older shard waits for the same server"

    def choices(self, asked: Ask) -> list[str]:
        return [name for name in self.caps if name not in asked.avoid]

    @rule(
        client=st.sampled_from(CLIENTS),
        order=st.integers(0, 3),
        limit=st.integers(1, 6),
        avoid=st.sets(st.sampled_from(SERVERS), max_size=2),
        alone=st.sampled_from([False, False, False, True]),
        count=st.integers(1, 5),
    )
    def ask(self, client: str, order: int, limit: int, avoid: set[str], alone: bool, count: int) -> None:
        for _ in range(count):
            self.number += 1
            asked = Ask(client, self.number, order, limit, frozenset(avoid), alone)
            self.pool.ask(asked)
            self.waiting[asked.key] = asked
        self.settle()

    @rule(name=st.sampled_from(SERVERS), cap=st.one_of(st.none(), st.integers(1, 5)))
    def open(self, name: str, cap: int | None) -> None:
        self.pool.open(name, cap)
        self.caps[name] = cap
        self.settle()

    @precondition(lambda self: self.caps)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.caps)))
        self.pool.close(name)
        del self.caps[name]
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        assert self.pool.release(key) == self.held.pop(key)
        self.alone_at.pop(key, None)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.pool.cancel(key)
        del self.waiting[key]
        self.settle()

    @rule(client=st.sampled_from(CLIENTS))
    def drop(self, client: str) -> None:
        self.pool.drop(client)
        for account in (self.waiting, self.held, self.alone_at):
            for key in [key for key in account if key[0] == client]:
                del account[key]
        self.settle()

    @rule(name=st.sampled_from(SERVERS), answers=st.integers(0, 3))
    def full(self, name: str, answers: int) -> None:
        self.pool.full(name)
        self.settle()
        self.pool.resume(name)
        for _ in range(answers):
            self.pool.well(name)
        self.settle()

    @invariant()
    def never_above_a_limit(self) -> None:
        for name in SERVERS:
            held = [key for key, server in self.held.items() if server == name]
            if name in self.pool.slots:
                assert self.pool.slots[name].outstanding == set(held)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Where a server stands open and empty for nobody's sake, nobody waits that could have it."""
        assert self.pool.waiting == len(self.waiting)
        for name in self.caps:
            if any(server == name for server in self.held.values()) or self.pool.slots[name].reserved:
                continue
            for asked in self.waiting.values():
                assert asked.alone or (name in asked.avoid and self.choices(asked))


class TestPool(PoolMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(3))
def test_limits_hold_in_a_long_run(seed: int) -> None:
    """A server that comes and goes: at no moment more than cap and margin, or the job's limit."""
    chooser = random.Random(seed)
    caps = {"a": 5, "b": 9, "c": None}
    pool = pool_of(**caps)
    number = done = 0
    held: list[tuple[str, int]] = []
    for _ in range(3000):
        if chooser.random() < 0.5 and number < 1500:
            number += 1
            pool.ask(Ask(chooser.choice(CLIENTS), number, chooser.randrange(4), limit=12))
        elif held:
            pool.release(held.pop(chooser.randrange(len(held))))
            done += 1
        if chooser.random() < 0.05:
            pool.close("b") if pool.slots["b"].open else pool.open("b", 9)
        held += [grant.ask.key for grant in pool.grants()]
        assert len(pool.slots["a"].outstanding) <= 5 + 2
        assert len(pool.slots["b"].outstanding) <= 9 + 2
        assert len(pool.slots["c"].outstanding) <= 12
    pool.open("b", 9)
    held += [grant.ask.key for grant in pool.grants()]
    while held:
        pool.release(held.pop())
        done += 1
        held += [grant.ask.key for grant in pool.grants()]
    assert done == number and pool.waiting == 0
