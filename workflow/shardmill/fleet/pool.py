"""Who may send a request to which server: the rules, without any I/O, clock or randomness.

A waiter asks once and is granted once. Oldest shard first (the lowest `order`), first come first served within; the
server with the least requests outstanding is taken. A server never has more than its limit.

A server runs `cap` requests at once, and more of them only wait in its queue. While there is plenty of work, `margin`
more are sent, so that no slot is empty for the time that an answer and the next request take. When work runs out the
margin goes, so that at the end of a build no server idles while another one queues.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

Key = tuple[str, int]  # client, and the client's own number for the request


@dataclass(frozen=True, slots=True)
class Ask:
    """A wish for one lease. `limit`: the client's own generate.concurrency."""

    client: str
    number: int
    order: int
    limit: int
    avoid: frozenset[str] = frozenset()
    alone: bool = False

    @property
    def key(self) -> Key:
        return (self.client, self.number)


@dataclass(slots=True)
class Slot:
    """A server as the pool sees it."""

    name: str
    cap: int | None = None  # requests it runs at once; None: not known
    open: bool = False
    outstanding: set[Key] = field(default_factory=set)
    reserved: Key | None = None  # emptied, or held, for one ask that wants to be alone
    held_back: int = 0  # room not used for now, after the server said that its queue is full
    paused: bool = False
    last_grant: int = 0

    @property
    def margin(self) -> int:
        return 0 if self.cap is None else max(2, self.cap // 8)


@dataclass(frozen=True, slots=True)
class Grant:
    ask: Ask
    server: str


class Pool:
    """All servers, all leases and all that wait for one. Call `grants` after every change."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self._leases: dict[Key, str] = {}
        self._asks: dict[Key, Ask] = {}
        self._limits: Counter[int] = Counter()  # of the asks
        self._queue: list[tuple[int, int, Key]] = []
        self._alone: list[Key] = []
        self._ticket = 0

    # Servers

    def add(self, name: str) -> Slot:
        """A server that is known but closed; an old one by this name keeps its leases."""
        return self.slots.setdefault(name, Slot(name))

    def open(self, name: str, cap: int | None) -> None:
        slot = self.add(name)
        slot.cap, slot.open, slot.held_back, slot.paused = cap, True, 0, False

    def close(self, name: str) -> None:
        """No new leases at this server; those it has go on."""
        slot = self.slots[name]
        slot.open = False
        if slot.reserved is not None and slot.reserved not in slot.outstanding:
            slot.reserved = None

    def forget(self, name: str) -> None:
        """Drops a server, with the leases that it still has."""
        for key in self.slots.pop(name).outstanding:
            del self._leases[key]

    def full(self, name: str) -> None:
        """The server turned a request away, its queue is full: nothing more until `resume`, and then one less."""
        slot = self.slots.get(name)
        if slot is not None:
            slot.paused = True
            slot.held_back = min(slot.held_back + 1, max(len(slot.outstanding), 1))

    def resume(self, name: str) -> None:
        slot = self.slots.get(name)
        if slot is not None:
            slot.paused = False

    def well(self, name: str) -> None:
        """The server answered: give back one place that `full` took."""
        slot = self.slots.get(name)
        if slot is not None and slot.held_back:
            slot.held_back -= 1

    # Clients

    def ask(self, ask: Ask) -> None:
        """Queues an ask. Its key must not be in use."""
        if ask.key in self._asks or ask.key in self._leases:
            raise ValueError(f"lease {ask.key} was asked for twice")
        self._asks[ask.key] = ask
        self._limits[ask.limit] += 1
        if ask.alone:
            self._alone.append(ask.key)
        else:
            self._ticket += 1
            heapq.heappush(self._queue, (ask.order, self._ticket, ask.key))

    def adopt(self, key: Key, server: str) -> None:
        """Counts a lease that a fleet before this one granted, also at a server that is not known yet."""
        if key not in self._leases:
            self.add(server).outstanding.add(key)
            self._leases[key] = server

    def cancel(self, key: Key) -> None:
        """Takes an ask back; nothing happens when it was granted already."""
        if key in self._asks:
            self._answered(key)
            self._unreserve(key)

    def cancel_all(self, client: str) -> int:
        """Takes back all that a client asked for and was not granted; how many that were."""
        keys = [key for key in self._asks if key[0] == client]
        for key in keys:
            self.cancel(key)
        return len(keys)

    def release(self, key: Key) -> str | None:
        """Ends a lease and returns its server; None when there is no such lease (any more)."""
        server = self._leases.pop(key, None)
        if server is not None:
            self.slots[server].outstanding.discard(key)
            self._unreserve(key)
        return server

    def drop(self, client: str) -> list[str]:
        """A client is gone: its asks and leases go. Returns the servers of its leases."""
        self.cancel_all(client)
        return [name for key in self.leases_of(client) if (name := self.release(key)) is not None]

    def leases_of(self, client: str) -> list[Key]:
        return [key for key in self._leases if key[0] == client]

    @property
    def waiting(self) -> int:
        return len(self._asks)

    def waiting_by_client(self) -> Counter[str]:
        return Counter(client for client, _ in self._asks)

    # Grants

    def grants(self) -> list[Grant]:
        """Gives out all that can be given out now, in order."""
        given = list(self._grant_alone())
        passed: list[tuple[int, int, Key]] = []
        while self._queue and self._any_room():
            entry = heapq.heappop(self._queue)
            ask = self._asks.get(entry[2])
            if ask is None:
                continue  # cancelled
            slot = self._pick(ask)
            if slot is None:
                passed.append(entry)  # it alone must wait: others may fit
                continue
            given.append(self._give(ask, slot))
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return given

    def limit(self, slot: Slot, client_limit: int) -> int:
        """Requests that `slot` may have outstanding at the moment."""
        if slot.cap is None:
            allowed = client_limit
        else:
            allowed = min(client_limit, slot.cap + (slot.margin if self._plenty() else 0))
        return max(1, allowed - slot.held_back)

    def _plenty(self) -> bool:
        return self.waiting > 2 * sum(slot.margin for slot in self.slots.values() if slot.open)

    def _any_room(self) -> bool:
        most = max(self._limits, default=0)
        return any(self._takes(slot, most) for slot in self.slots.values())

    def _takes(self, slot: Slot, client_limit: int) -> bool:
        return (
            slot.open
            and not slot.paused
            and slot.reserved is None
            and len(slot.outstanding) < self.limit(slot, client_limit)
        )

    def _pick(self, ask: Ask) -> Slot | None:
        free = [slot for slot in self._choices(ask) if self._takes(slot, ask.limit)]
        return min(free, key=_least_outstanding, default=None)

    def _choices(self, ask: Ask) -> list[Slot]:
        """Open servers; those to be avoided only where there is no other."""
        all_open = [slot for slot in self.slots.values() if slot.open]
        others = [slot for slot in all_open if slot.name not in ask.avoid]
        return others or all_open

    def _give(self, ask: Ask, slot: Slot) -> Grant:
        self._answered(ask.key)
        slot.outstanding.add(ask.key)
        self._ticket += 1
        slot.last_grant = self._ticket
        self._leases[ask.key] = slot.name
        return Grant(ask, slot.name)

    def _answered(self, key: Key) -> None:
        limit = self._asks.pop(key).limit
        self._limits[limit] -= 1
        if not self._limits[limit]:
            del self._limits[limit]

    def _grant_alone(self) -> Iterator[Grant]:
        """One such ask at a time in the whole pool: it may be one that kills servers."""
        self._alone = [key for key in self._alone if key in self._asks]
        if not self._alone:
            return
        ask = self._asks[self._alone[0]]
        reserved = [slot for slot in self.slots.values() if slot.reserved is not None]
        if not reserved:
            slot = min(self._choices(ask), key=_least_outstanding, default=None)
            if slot is None:
                return
            slot.reserved = ask.key
            reserved = [slot]
        slot = reserved[0]
        if slot.reserved == ask.key and not slot.outstanding and slot.open:
            yield self._give(ask, slot)

    def _unreserve(self, key: Key) -> None:
        for slot in self.slots.values():
            if slot.reserved == key:
                slot.reserved = None


def _least_outstanding(slot: Slot) -> tuple[int, int]:
    return (len(slot.outstanding), slot.last_grant)
