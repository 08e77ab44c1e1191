# SPDX-License-Identifier: Apache-2.0
"""Deadlines against a plain dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from epd_connector.core.deadlines import Deadlines

keys = st.integers(0, 5)
times = st.integers(0, 20).map(float)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), keys, times),
        st.tuples(st.just("clear"), keys, times),
        st.tuples(st.just("expired"), keys, times),
    ),
    max_size=300,
)


@given(steps)
def test_it_does_what_a_dictionary_would(steps: list[tuple[str, int, float]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, float] = {}
    for step, key, when in steps:
        match step:
            case "set":
                deadlines.set(key, when)
                model[key] = when
            case "clear":
                deadlines.clear(key)
                model.pop(key, None)
            case _:
                due = {key for key, at in model.items() if at <= when}
                got = deadlines.expired(when)
                assert len(got) == len(due)
                assert set(got) == due
                assert [model[key] for key in got] == sorted(model[key] for key in got)
                model = {key: at for key, at in model.items() if key not in due}
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_moving_a_deadline_for_ever_takes_bounded_memory() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for when in range(10_000):
        deadlines.set("beat", float(when))
    assert len(deadlines._heap) <= 65
    assert deadlines.expired(9_999.0) == ["beat"]


def test_keys_of_one_time_come_in_the_order_they_were_set() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key in ("b", "c", "a"):
        deadlines.set(key, 1.0)
    assert deadlines.expired(1.0) == ["b", "c", "a"]
