#!/usr/bin/env python3
"""Checks the plan for 1,000,000 requests a second in docs/scaling.md, by simulation.

    scripts/plan-1m.py                  the plan as it is written
    scripts/plan-1m.py --servers 6      another one; --help names every assumption
    scripts/plan-1m.py --short          less of the same, for the tests

What a refusal, a win and a store cost is read from benches/results, where `seckill bench` has written
what it measured. The rest is queueing. A group of calls that reach one server in the same millisecond
is one event; it waits for the server's cores, may go on to a Redis and a database, and is answered. The
same arguments give the same answer: chance has a seed.

With --tables it prints what stands in docs/scaling.md: `UPDATE_EXPECT=1 cargo test --test suite -- plans`
puts it there.

Needs Python 3.8 and nothing else. Exits with 0 if the plan holds and with 1 if it does not.
"""

import argparse
import heapq
import itertools
import json
import math
import pathlib
import random
import sys

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benches" / "results"
TICK = 0.001
# proto/seckill/v1/seckill_grpc_service_config.json
ATTEMPTS = 5
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 1.0
TOKENS, TOKENS_PER_ANSWER = 100.0, 0.1
# How long a server asks the engine on after the last unit is gone, until it knows who holds one.
LEARNS_SOLD_OUT = 0.02
# What the plan has to keep.
MOST_BUSY = 0.8
REFUSAL_P99, WIN_P99, SOLD_WITHIN = 0.1, 1.0, 2.0


def measured(file, name):
    """The median of a figure that the bench has written."""
    figures = json.loads((RESULTS / file).read_text())["figures"]
    return next(figure["median"] for figure in figures if figure["figure"] == name)


def arguments(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--peak", type=float, default=1_000_000, help="requests a second at the start of the sale")
    add("--ramp", type=float, default=0.2, help="seconds until so many come")
    add("--hold", type=float, default=5.0, help="seconds for which they come")
    add("--decay", type=float, default=2.0, help="seconds in which they then become a third")
    add("--seconds", type=float, default=10.0, help="seconds to simulate")
    add("--units", type=int, default=10_000, help="units on sale, over all offers")
    add("--offers", type=int, default=30, help="offers, or segments of offers, dealt to the masters")
    add("--servers", type=int, default=16, help="servers, of which one is lost at the peak")
    add("--cores", type=int, default=4, help="cores of a server")
    add("--masters", type=int, default=3, help="masters of the Redis Cluster")
    add("--databases", type=int, default=1, help="databases, each with its own activities")
    add("--clients", type=int, default=200, help="processes of order services that call")
    add("--again", type=float, default=0.3, help="share of refused buyers who ask once more")
    add("--again-after", type=float, default=2.0, help="after so many seconds")
    add("--limited", type=float, default=0.1, help="share that limits of address and user refuse")
    add("--uneven", type=float, default=0.1, help="how far a server's share is from the mean")
    add("--network", type=float, default=1.0, help="the kernel's CPU, in that of the server")
    add("--room", type=int, default=1_000, help="reservations under way in a server")
    add("--refusal-us", type=float, help="CPU of a refusal, in place of the measured one")
    add("--win-us", type=float, help="CPU of a win in a server, in place of the measured one")
    add("--store-per-s", type=float, help="wins of a master or a database, in place of the measured")
    add("--seed", type=int, default=1, help="of chance")
    add("--short", action="store_true", help="its first second alone")
    add("--tables", action="store_true", help="the tables of docs/scaling.md, and nothing else")
    plan = parser.parse_args(words)
    if plan.short:
        plan.seconds, plan.hold, plan.decay = 1.2, 0.8, 0.2
    if plan.refusal_us is None:
        plan.refusal_us = measured("sold-out-redis-postgres.json", "refusal_cpu_us")
    if plan.win_us is None:
        plan.win_us = measured("overload-redis-postgres.json", "win_cpu_us")
    if plan.store_per_s is None:
        # All of it together on two cores; one part alone does more.
        plan.store_per_s = measured("overload-redis-postgres.json", "saturation_per_s")
    return plan


class Queue:
    """Work that waits for `width` cores, first come first served."""

    def __init__(self, width):
        self.width, self.free_at, self.work, self.longest = width, 0.0, {}, 0.0

    def add(self, now, work):
        """When work that comes now is done."""
        self.free_at = max(self.free_at, now) + work / self.width
        self.longest = max(self.longest, self.free_at - now)
        second = int(now * 4)
        self.work[second] = self.work.get(second, 0.0) + work
        return self.free_at

    def busiest(self):
        """The most that was asked of it in a quarter of a second, as a share of what it can do."""
        return max(self.work.values(), default=0.0) * 4 / self.width


class Server(Queue):
    def __init__(self, cores, share, room):
        super().__init__(cores)
        self.share, self.room, self.under_way = share, room, 0
        self.is_lost, self.knows_sold_out_at = False, None


class Latencies:
    """Times by how many had them."""

    def __init__(self):
        self.counts = {}

    def add(self, seconds, count):
        bucket = int(seconds * 10_000)
        self.counts[bucket] = self.counts.get(bucket, 0) + count

    def percentile(self, share):
        rank, seen = share * sum(self.counts.values()), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return (bucket + 1) / 10_000
        return 0.0


class Sale:
    def __init__(self, plan):
        self.plan, self.chance = plan, random.Random(plan.seed)
        self.refusal, self.win = plan.refusal_us / 1e6, plan.win_us / 1e6
        factor = 1.0 + plan.network
        self.refusal, self.win = self.refusal * factor, self.win * factor
        shares = [1 + plan.uneven * self.chance.uniform(-1, 1) for _ in range(plan.servers)]
        self.servers = [Server(plan.cores, share, plan.room) for share in shares]
        self.masters = [Queue(1) for _ in range(plan.masters)]
        self.databases = [Queue(1) for _ in range(plan.databases)]
        # Offers fall to masters by the hash of their names.
        self.master_of = [self.chance.randrange(plan.masters) for _ in range(plan.offers)]
        self.stock = [plan.units // plan.offers] * plan.offers
        self.stock[0] += plan.units % plan.offers
        self.left, self.sold_at = plan.units, None
        # Calls are dealt evenly to the clients, so the bucket of one stands for all.
        self.tokens = TOKENS
        self.events, self.order = [], itertools.count()
        # Who will ask once more in which millisecond.
        self.again = {}
        self.told = {}
        self.refused, self.in_vain, self.won = Latencies(), Latencies(), Latencies()

    def at(self, time, what, *words):
        heapq.heappush(self.events, (time, next(self.order), what, words))

    def tell(self, what, count):
        self.told[what] = self.told.get(what, 0) + count

    def some_of(self, count, share):
        """How many of these, each by chance."""
        share = min(share, 1.0)
        drawn = self.chance.gauss(count * share, (count * share * (1 - share)) ** 0.5)
        return min(count, max(0, round(drawn)))

    def arriving(self, time):
        plan = self.plan
        if time < plan.ramp:
            return plan.peak * time / plan.ramp
        over = time - plan.ramp - plan.hold
        return plan.peak * (1.0 if over <= 0 else 3 ** (-over / plan.decay))

    def run(self):
        plan = self.plan
        for tick in range(int(plan.seconds / TICK)):
            self.at(tick * TICK, self.come)
        self.at(plan.ramp + 0.1, self.lose_a_server)
        while self.events:
            time, _, what, words = heapq.heappop(self.events)
            if time > plan.seconds + 5:
                break
            what(time, *words)

    def lose_a_server(self, _time):
        self.servers[0].is_lost = len(self.servers) > 1

    def come(self, time):
        """Buyers of this millisecond."""
        mean = self.arriving(time) * TICK
        self.deal(time, max(0, round(self.chance.gauss(mean, mean**0.5))), 1)

    def deal(self, time, count, attempt):
        for server, here in self.dealt(count):
            self.reach(time, server, here, attempt)

    def dealt(self, count):
        """The balancer: to each server its share."""
        servers = [server for server in self.servers if not server.is_lost]
        shares = sum(server.share for server in servers)
        for server in servers:
            here = self.some_of(count, server.share / shares)
            count, shares = count - here, shares - server.share
            if here:
                yield server, here

    def reach(self, time, server, count, attempt):
        """Some calls reach a server: most are refused from its memory."""
        came = count
        limited = self.some_of(count, self.plan.limited) if attempt == 1 else 0
        count -= limited
        knows = server.knows_sold_out_at
        if knows is not None and time >= knows:
            sold_out, admitted = count, 0
        else:
            sold_out, admitted = 0, min(count, server.room - server.under_way)
        overloaded = count - sold_out - admitted
        done = server.add(time, (came - admitted) * self.refusal + admitted * self.win)
        for what, some in (("RATE_LIMITED", limited), ("SOLD_OUT from memory", sold_out)):
            self.refuse(time, done, what, some, self.refused)
        if overloaded:
            self.refused.add(done - time, overloaded)
            self.tell("OVERLOADED", overloaded)
            self.repeat(done, overloaded, attempt)
        if admitted:
            server.under_way += admitted
            # What is under way together goes to a few offers.
            some = max(1, admitted // 8)
            for first in range(0, admitted, some):
                taken = min(some, admitted - first)
                self.at(done, self.ask_engine, server, self.chance.randrange(len(self.stock)), taken, time)
        self.answered(came - limited - overloaded)

    def refuse(self, time, done, what, count, latencies):
        if count:
            latencies.add(done - time, count)
            self.tell(what, count)
            if what != "asked again":
                again = self.some_of(count, self.plan.again)
                when = done + self.plan.again_after * self.chance.uniform(0.5, 1.5)
                tick = int(when / TICK) + 1
                if tick not in self.again:
                    self.again[tick] = 0
                    self.at(tick * TICK, self.ask_again, tick)
                self.again[tick] += again

    def ask_again(self, time, tick):
        """Buyers who do not believe it; at most once each, since these are not counted again."""
        for server, here in self.dealt(self.again.pop(tick)):
            done = server.add(time, here * self.refusal)
            self.refuse(time, done, "asked again", here, self.refused)

    def repeat(self, time, count, attempt):
        """The library of a client repeats, while its bucket of tokens is more than half full."""
        may = self.tokens > TOKENS / 2 and attempt < ATTEMPTS
        self.tokens = max(0.0, self.tokens - count / self.plan.clients)
        again = count if may else 0
        if again:
            backoff = min(FIRST_BACKOFF * 2 ** (attempt - 1), LONGEST_BACKOFF)
            self.tell("repeated by the library", again)
            self.at(time + backoff * self.chance.uniform(0.8, 1.2), self.deal, again, attempt + 1)
        self.tell("told to come back later", count - again)

    def answered(self, count):
        self.tokens = min(TOKENS, self.tokens + TOKENS_PER_ANSWER * count / self.plan.clients)

    def ask_engine(self, time, server, offer, count, came):
        """reserve.lua: units for some, and SOLD_OUT for the rest."""
        master = self.masters[self.master_of[offer]]
        done = master.add(time, count / self.plan.store_per_s)
        taken = min(count, self.stock[offer])
        self.stock[offer] -= taken
        self.left -= taken
        if self.left == 0 and server.knows_sold_out_at is None:
            # Its own offers are known one by one; the last one counts here.
            for other in self.servers:
                other.knows_sold_out_at = done + LEARNS_SOLD_OUT
        self.at(done, self.leave, server, count - taken, came)
        if taken:
            self.at(done, self.commit, server, offer, taken, came)

    def leave(self, time, server, count, came):
        server.under_way -= count
        self.refuse(came, time, "SOLD_OUT by the engine", count, self.in_vain)

    def commit(self, time, server, offer, count, came):
        """One group commit of the outbox; the order follows behind it."""
        database = self.databases[offer % len(self.databases)]
        done = database.add(time, count / self.plan.store_per_s)
        self.at(done, self.win_is_told, server, count, came)

    def win_is_told(self, time, server, count, came):
        server.under_way -= count
        self.won.add(time - came, count)
        self.tell("RESERVED", count)
        if self.told["RESERVED"] == self.plan.units:
            self.sold_at = time

    def judged(self):
        """What the plan has to keep: its name, how it came out, and the most that it may be."""
        return (
            ("busiest server", max(queue.busiest() for queue in self.servers), MOST_BUSY),
            ("units are sold within", self.sold_at, SOLD_WITHIN),
            ("p99 of a refusal from memory", self.refused.percentile(0.99), REFUSAL_P99),
            ("p99 of a win", self.won.percentile(0.99), WIN_P99),
            ("p99 of a refusal by the engine", self.in_vain.percentile(0.99), WIN_P99),
        )

    def report(self):
        plan = self.plan
        print(f"{plan.peak:,.0f} requests a second for {plan.units:,} units of {plan.offers} offers")
        print(
            f"{plan.servers} servers of {plan.cores} cores (one is lost at the peak), "
            f"{plan.masters} masters, {plan.databases} database(s)"
        )
        print(
            f"a refusal {plan.refusal_us:.1f} µs, a win {plan.win_us:.1f} µs of a server, and "
            f"{percent(plan.network)} of that for the network; a store does {plan.store_per_s:,.0f} wins/s"
        )
        print()
        for what, count in sorted(self.told.items()):
            print(f"{count:12,}  {what}")
        print()
        missed = missed_by(self.judged())
        for what, figure, most in self.judged():
            unit = percent if what == "busiest server" else milliseconds
            verdict = "MISSED" if what in missed else "ok    "
            print(f"{verdict}  {what}: {unit(figure)} (at most {unit(most)})")
        # While units are left the stores are as busy as they can be; that ends when all is sold.
        for what, queues in (("master", self.masters), ("database", self.databases)):
            longest = max(queue.longest for queue in queues)
            print(f"        longest queue at a {what}: {milliseconds(longest)}")
        print()
        print("the plan holds" if not missed else f"the plan does not hold: {', '.join(missed)}")
        return 1 if missed else 0


def missed_by(judged):
    return [what for what, figure, most in judged if figure is None or figure > most]


def percent(share):
    return f"{share * 100:.0f} %"


def milliseconds(span):
    return "never" if span is None else f"{span * 1000:,.1f} ms"


def cell(span):
    """A time in a table, to two digits."""
    if span is None:
        return "never"
    if span == 0:
        return "0 ms"
    digits = 1 - math.floor(math.log10(span * 1000))
    shown = round(span * 1000, digits)
    return f"{shown / 1000:g} s" if shown >= 100 else f"{shown:g} ms"


PLANS = (
    ("16 servers, 3 masters, 1 database", ""),
    ("14 servers", "--servers 14"),
    ("12 servers", "--servers 12"),
    ("16 servers, 100,000 units", "--units 100000"),
    ("the same with 6 masters, 4 databases", "--units 100000 --masters 6 --databases 4"),
)


def tables():
    """The tables of docs/scaling.md."""
    plan = arguments([])
    refusal = plan.refusal_us * (1 + plan.network)
    calls = measured("sold-out-redis-postgres.json", "engine_calls_per_refusal")
    print(
        f"""\
| what | measured | for the plan |
| --- | --- | --- |
| a refusal from memory | {plan.refusal_us:.1f} µs of the server (`refusal_cpu_us`) | {refusal:.0f} µs: \
as much again for the kernel's network |
| a win | {plan.win_us:.1f} µs of the server (`win_cpu_us`) | {plan.win_us * (1 + plan.network):.0f} µs |
| wins a second of Redis, PostgreSQL and server on two cores | {plan.store_per_s:,.0f} \
(`saturation_per_s`) | each Redis master, and each database, does as much alone; it does more |
| engine calls per refusal | {calls:.2g} | none |
"""
    )
    cores = plan.peak * refusal / 1e6
    again = cores * (1 + plan.again)
    even = again / MOST_BUSY
    uneven = even * (1 + plan.uneven)
    servers = math.ceil(uneven / plan.cores)
    rush = plan.units / plan.store_per_s
    print(
        f"""\
| by hand | |
| --- | --- |
| {plan.peak:,.0f} refusals a second, {refusal:.0f} µs each | {cores:.0f} cores |
| and {percent(plan.again)} who ask once more | {again:.0f} |
| and no server busier than {percent(MOST_BUSY)} | {even:.0f} |
| and deals that are uneven by {percent(plan.uneven)} | {uneven:.0f} |
| servers of {plan.cores} cores, with one more that may be lost at the worst moment | {servers + 1} |
| {plan.units:,} wins, at {plan.store_per_s:,.0f} a second | {cell(rush)} |
| requests that come meanwhile | {plan.peak * rush:,.0f} |
"""
    )
    print("| simulated | busiest server | sold within | p99 of a refusal from memory | p99 of a win | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for what, words in PLANS:
        sale = Sale(arguments(words.split()))
        sale.run()
        judged = sale.judged()
        busiest, sold, refused, won = (figure for _, figure, _ in judged[:4])
        missed = missed_by(judged)
        verdict = "holds" if not missed else f"misses: {', '.join(missed)}"
        print(f"| {what} | {percent(busiest)} | {cell(sold)} | {cell(refused)} | {cell(won)} | {verdict} |")
    return 0


def main():
    plan = arguments()
    if plan.tables:
        return tables()
    sale = Sale(plan)
    sale.run()
    return sale.report()


if __name__ == "__main__":
    sys.exit(main())
