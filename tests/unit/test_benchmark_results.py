# SPDX-License-Identifier: Apache-2.0
"""What the benchmark makes of its times: ratios within rounds, goals, the file."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import burst, engines, item, reassembly, rooms, stages
from benchmarks.deployment import Deployment, Timing
from benchmarks.engines import Way
from benchmarks.ranks import Cell
from benchmarks.reassembly import StepCost
from benchmarks.results import Goal, Measured, Series, excess, goals_table, ratio, write
from benchmarks.rooms import RoomCost
from benchmarks.sides import Setup
from epd_connector.testing.chat import ChatResult


def test_ratios_and_differences_are_of_the_same_round() -> None:
    assert ratio((2.0, 30.0, 4.0), (1.0, 10.0, 4.0)) == 2.0
    assert excess((2.0, 30.0, 4.0), (1.0, 10.0, 4.0)) == 1.0
    with pytest.raises(ValueError, match="shorter"):
        ratio((1.0, 2.0), (1.0,))


@pytest.mark.parametrize(("value", "met"), [(0.9, True), (1.0, True), (1.01, False)])
def test_a_goal_is_met_up_to_its_limit(value: float, met: bool) -> None:
    goal = Goal("what", "ms", 1.0, value)
    assert goal.met is met
    assert goals_table([goal]).splitlines()[1].split()[-1] == ("yes" if met else "no")


def test_the_file_holds_conditions_every_value_and_the_goals(tmp_path: Path) -> None:
    series = Series("item", "one", "ms", (3.0, 1.0, 2.0))
    path = tmp_path / "results" / "latest.json"
    write(path, Measured([series], [Goal("fast", "ms", 2.5, 2.0)]), {"cpus": 2})
    found = json.loads(path.read_text())
    assert found["conditions"] == {"cpus": 2}
    assert found["series"] == [
        {
            "section": "item",
            "name": "one",
            "unit": "ms",
            "median": 2.0,
            "p10": 1.0,
            "p90": 3.0,
            "values": [3.0, 1.0, 2.0],
        }
    ]
    assert found["goals"] == [
        {"name": "fast", "unit": "ms", "goal": 2.5, "value": 2.0, "met": True}
    ]


def cell(connector: str, transport: str, ranks: int, size: str, *landed: float) -> Cell:
    """What a configuration came to; nothing of it ever ran."""
    layout = "shared" if ranks > 1 else "whole"
    setup = Setup(connector, transport, layout, ranks, 1, "key", "", 1)
    deployment = cast(Deployment, SimpleNamespace(setup=setup))
    return Cell(deployment, size, [Timing(ms, ms + 1) for ms in landed], sent_share=1.0)


def test_items_are_held_against_the_bare_write_of_the_same_size_and_round() -> None:
    found = item.compare(
        [
            cell("epd", "mooncake", 1, "0.26", 1.0, 2.0, 3.0),
            cell("raw", "mooncake", 1, "0.26", 0.5, 1.5, 2.5),
            cell("epd", "mooncake", 4, "67.1", 50.0, 60.0, 70.0),
            cell("raw", "mooncake", 1, "67.1", 40.0, 40.0, 40.0),
            cell("copy", "shm", 1, "16.8", 2.0, 2.0, 2.0),
            cell("in-tree", "mooncake", 1, "16.8", 9.0, 9.0, 9.0),
        ]
    )
    goals = {goal.name: (goal.unit, goal.value, goal.met) for goal in found.goals}
    assert goals == {
        "mooncake 0.26 MB whole x1 minus raw": ("ms", 0.5, True),
        "mooncake 67.1 MB shared x4 over raw": ("x", 1.5, False),
        "mooncake shared, 4 ranks: bytes sent": ("x item", 1.0, True),
    }
    assert len(found.series) == 12


def test_rooms_are_to_cost_the_same_however_many_there_are() -> None:
    few = RoomCost(100, 1, 50.0, 200.0, 0.0, 0.0, 1.0, 2.0)
    many = RoomCost(10_000, 1, 55.0, 260.0, 0.0, 0.0, 1.0, 2.0)
    peers = RoomCost(1_000, 8, 999.0, 999.0, 0.0, 0.0, 1.0, 2.0)
    goals = {goal.name: (goal.value, goal.met) for goal in rooms.compare([many, few, peers]).goals}
    assert goals == {
        "encode CPU per room, 10000 rooms over 100": (1.1, True),
        "encode CPU per room, at most": (55.0, True),
        "prefill CPU per room, 10000 rooms over 100": (1.3, False),
        "prefill CPU per room, at most": (260.0, False),
    }


def test_a_burst_is_held_against_one_bare_write_of_its_round() -> None:
    name = "64 x 4.2 MB"
    taken = {("mooncake", name): (2.2, 3.0, 1.0), ("raw", name): (2.0, 2.0, 2.0)}
    (goal,) = burst.compare(taken).goals
    assert (goal.value, goal.met) == (1.1, True)


def test_one_step_with_two_collectives_is_one_too_many() -> None:
    costs = [StepCost(2, 1, (1.0,), 1), StepCost(4, 16, (5.0,), 2)]
    (goal,) = reassembly.compare(costs).goals
    assert (goal.value, goal.met) == (2.0, False)


def test_a_request_alone_may_pay_for_the_transfer_and_two_steps() -> None:
    def ask(picture: str) -> ChatResult:
        raise AssertionError(f"nobody is asked about {picture}")

    def way(name: str, *first_s: float) -> Way:
        return Way(name, ask, first_s={1: list(first_s)}, rate={1: [1.0]}, step_s=[0.01, 0.01])

    found = engines.compare([way("monolithic", 0.1, 0.1), way("epd", 0.125, 0.127)], [0.004, 0.008])
    (goal,) = found.goals
    assert (round(goal.goal, 6), round(goal.value, 6), goal.met) == (26.0, 26.0, True)


def test_stages_are_the_medians_of_what_passes_from_one_to_the_next() -> None:
    first, second, third = stages.STAGES[:3]
    items = [
        [(first, 0), (third, 1), (second, 2_000), (third, 5_000)],
        [(first, 10_000), (second, 14_000), (third, 15_000)],
        [(first, 20_000), (second, 23_000), (second, 90_000), (third, 25_000)],
    ]
    assert stages.between(items) == {second: 3.0, third: 2.0}
