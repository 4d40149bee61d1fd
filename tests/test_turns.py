"""Ratios of what took turns: noise and drift are no difference, and a true one is found."""

import json
import math
import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

import regard.turns as turns
from regard.turns import LEAST, Ratio, in_turns, perplexity_ratio, ratio_of

ROUNDS = 24
SEEDS = range(200)


class Machine:
    """A machine whose speed drifts and is disturbed, and programs of a known true cost.

    Over the run it becomes `slower` times as slow; bursts of other programs, some longer than a
    round, take up to two thirds of it; every run has its own noise of `noise` standard deviations.
    """

    def __init__(self, seed, costs, rounds=ROUNDS, slower=2.0, noise=0.05, bursts=True):
        self.random, self.costs = random.Random(seed), costs
        self.slower, self.noise, self.total = slower, noise, rounds * sum(costs.values())
        self.bursts, self.load, self.until, self.done = bursts, 1.0, 0.0, 0.0

    def program(self, name):
        def run():
            if self.bursts and self.done >= self.until:
                self.load = self.random.choice([1.0, 1.0, 1.5, 3.0])
                self.until = self.done + self.random.expovariate(1.0) * 4 * max(self.costs.values())
            self.done += self.costs[name]
            drift = self.slower ** (self.done / self.total)
            jitter = math.exp(self.random.gauss(0.0, self.noise))
            return self.costs[name] * drift * self.load * jitter

        return run

    def ratio(self, rounds=ROUNDS):
        """The speed of the second program over that of the first, as measured in turns."""
        first, second = in_turns({n: self.program(n) for n in self.costs}, rounds).values()
        return ratio_of(first, second)


def share(found):
    found = list(found)
    return sum(found) / len(found)


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rounds", [LEAST, 12, ROUNDS])
def test_equal_speeds_on_a_drifting_machine_are_no_difference(rounds, slower):
    """By chance a run in 20 may differ, more in none of the 200 of each kind than of 5 % + 3 sd."""
    machines = (Machine(seed, {"a": 1.0, "b": 1.0}, rounds, slower) for seed in SEEDS)
    assert share(each.ratio(rounds).differs for each in machines) <= 0.05 + 3 * 0.0155


@pytest.mark.parametrize("speed", [0.8, 1.25])
def test_a_true_difference_is_found_under_the_same_drift(speed):
    machines = (Machine(seed, {"a": 1.0, "b": 1.0 / speed}) for seed in SEEDS)
    found = [each.ratio() for each in machines]
    assert share(ratio.differs and (ratio.value < 1) == (speed < 1) for ratio in found) >= 0.95
    assert share(ratio.low <= speed <= ratio.high for ratio in found) >= 0.9


def test_times_of_one_program_after_the_other_would_differ():
    """The machine that slows down by two does deceive who measures one and then the other."""
    machine = Machine(0, {"a": 1.0, "b": 1.0}, bursts=False)
    first, second = ([machine.program(name)() for _ in range(ROUNDS)] for name in "ab")
    assert ratio_of(first, second).differs


def test_every_second_round_goes_backwards():
    calls = []
    runs = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    assert in_turns(runs, 3) == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert "".join(calls) == "abccbaabc"


def test_after_the_limit_no_round_begins_once_there_are_enough(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run():
        now[0] += 1.0
        return now[0]

    def rounds(**options):
        now[0] = 0.0
        return len(in_turns({"a": run}, 20, **options)["a"])

    assert (rounds(), rounds(limit=0.0), rounds(limit=8.5)) == (20, LEAST, 9)
    assert rounds(until=lambda found: True) == LEAST
    assert rounds(until=lambda found: len(found["a"]) == 11) == 11


def test_an_interval_of_five_per_cent_is_narrow():
    assert Ratio(0.5, 0.49, 0.514, LEAST).is_narrow
    assert not Ratio(0.5, 0.487, 0.513, LEAST).is_narrow


@pytest.mark.parametrize("pairs", range(1, 60))
def test_the_interval_is_the_quartiles_or_further_out(pairs):
    """By chance alone, 1 is outside in a run of 20 at most: the sign test; fewer say nothing."""
    values = [float(each) for each in range(1, pairs + 1)]
    found = ratio_of(values, [1.0] * pairs)
    out = int(found.low) - 1
    assert found.high == pairs - out and out <= pairs // 4
    assert found.value == (pairs + 1) / 2
    chance = 2 * sum(math.comb(pairs, k) for k in range(out + 1)) / 2**pairs
    assert chance <= 0.05 or (pairs < LEAST and not found.differs)
    assert pairs < 24 or out == pairs // 4
    assert pairs < LEAST or found.differs == (out > 0)


@pytest.mark.parametrize("pairs", [1, LEAST - 1])
def test_few_pairs_are_no_difference(pairs):
    assert not ratio_of([2.0] * pairs, [1.0] * pairs).differs
    assert ratio_of([2.0] * LEAST, [1.0] * LEAST).differs


def test_one_round_that_was_interrupted_changes_no_ratio():
    base, other = [1.0] * ROUNDS, [1.25] * ROUNDS
    found = ratio_of(base, [*other[:-1], 90.0])
    assert (found.value, found.low, found.high) == (0.8, 0.8, 0.8)


def test_a_ratio_is_a_cell_of_sixteen_characters_and_data():
    assert str(Ratio(0.5, 0.25, 0.75, 24)) == "0.50 (0.25-0.75)"
    assert str(Ratio(0.999, 0.9, 1.0, 24)) == "same (0.90-1.00)"
    data = json.dumps(asdict(Ratio(0.5, 0.25, 0.75, 24)))
    assert data == '{"value": 0.5, "low": 0.25, "high": 0.75, "pairs": 24}'


@pytest.mark.parametrize(("true", "tokens"), [(1.0, 128), (1.0, 2046), (1.1, 128)])
def test_a_perplexity_is_compared_token_by_token(true, tokens):
    """Losses differ much more between tokens than between two caches of one token."""

    def ratio(seed):
        torch.manual_seed(seed)
        base = 3.0 * torch.rand(tokens)
        return perplexity_ratio(base + math.log(true) + 0.1 * torch.randn(tokens), base)

    found = [ratio(seed) for seed in SEEDS]
    assert share(each.low <= true <= each.high for each in found) >= 0.9
    if true == 1.0:
        assert share(each.differs for each in found) <= 0.05 + 3 * 0.0155
    else:
        assert all(each.differs for each in found)


def test_a_perplexity_of_one_token_says_nothing():
    found = perplexity_ratio(torch.tensor([3.0]), torch.tensor([1.0]))
    assert not found.differs and found.low == 0.0
    json.dumps(asdict(found), allow_nan=False)
    same = perplexity_ratio(torch.ones(9), torch.ones(9))
    assert (same.value, same.low, same.high, same.differs) == (1.0, 1.0, 1.0, False)
