# SPDX-License-Identifier: Apache-2.0
"""Every rule is seen to be broken by a machine that is broken on purpose, and named."""

import random

import pytest

from tests.sim import invariants as rules
from tests.sim.fleet import Fleet
from tests.sim.mutants import MUTANTS, Mutant, applied
from tests.sim.runner import Finding, play_fleet
from tests.sim.weather import draw_shape

REQUESTS = 25
SEEDS = 40


def first_finding(mutant: Mutant, seeds: range) -> Finding | None:
    for seed in seeds:
        rng = random.Random(seed)
        fleet = Fleet(rng, mutant.weather, REQUESTS, mutant.shape or draw_shape(rng))
        finding = play_fleet(seed, fleet).finding
        if finding is not None:
            return finding
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_broken_machine_is_found_out(mutant: Mutant) -> None:
    with applied(mutant):
        finding = first_finding(mutant, range(SEEDS))
    assert finding is not None
    assert finding.invariant is mutant.invariant, finding.detail
    assert len(finding.trace) > 10


def test_every_rule_is_broken_by_some_machine() -> None:
    assert {mutant.invariant for mutant in MUTANTS} == set(rules.ALL)


def test_machines_are_whole_again_afterwards() -> None:
    for mutant in MUTANTS:
        with applied(mutant):
            broken = getattr(mutant.owner, mutant.name)
        assert getattr(mutant.owner, mutant.name) is not broken
    assert first_finding(MUTANTS[0], range(2)) is None
