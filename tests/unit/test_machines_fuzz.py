# SPDX-License-Identifier: Apache-2.0
"""Whatever the rank machines are told, in any order and by whomever: they do not raise."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_connector.core import receive, send_events
from epd_connector.protocol.frames import (
    Cancel,
    Cancelled,
    Hello,
    Landed,
    Ping,
    Pong,
    Refused,
    Stale,
    Stalled,
)
from tests.unit import receive_bench, send_bench

small = st.integers(0, 3)
numbers = st.integers(1, 3)
hashes = st.sampled_from(["a", "b"])
failures = st.sampled_from([None, send_bench.BROKEN])
rows = st.sampled_from([0, 1, 10])
grants = st.builds(
    lambda room, number, start, count, sharded, transport: msgspec.structs.replace(
        send_bench.full_grant(room, number),
        start=start,
        count=count,
        nbytes=count * send_bench.ROW_NBYTES,
        sharded=sharded,
        transport=transport,
    ),
    small,
    numbers,
    st.sampled_from([0, 5]),
    st.sampled_from([0, 5, 10]),
    st.booleans(),
    st.sampled_from(["shm", "none"]),
)
to_encode = st.one_of(
    grants,
    st.builds(Hello, small, numbers, st.sampled_from([0, 1 << 20]), st.just({"shm": "s"})),
    st.builds(Cancel, small, numbers),
    st.sampled_from([Ping(), Stale(9), Landed(1, 1)]),
)
send_input = st.one_of(
    st.builds(
        send_events.FromPeer, small, st.integers(1, 3), st.sampled_from([0, 9, 1000]), to_encode
    ),
    st.builds(send_events.Claim, small, hashes, rows),
    st.builds(
        lambda hash, rows: send_events.Encoded(hash, 1, rows, 4, "bfloat16", 8 * rows), hashes, rows
    ),
    st.builds(send_events.Staged, numbers, failures),
    st.builds(send_events.Wrote, numbers, failures),
    st.builds(send_events.Ended, small, st.just(send_bench.BROKEN)),
    st.builds(send_events.Skipped, small),
    st.builds(send_events.Receivers, small, numbers),
    st.just(send_events.Tick()),
)
times = st.sampled_from([0.0, 0.0, 0.5, 6.0, 31.0, 121.0])


@given(st.sampled_from([(0, 1), (1, 2)]), st.lists(st.tuples(send_input, times), max_size=60))
@settings(max_examples=200)
def test_an_encode_rank_takes_anything(
    place: tuple[int, int], steps: list[tuple[send_events.SendEvent, float]]
) -> None:
    bench = send_bench.encode_rank(
        *place, prefill_ranks=1, slab_nbytes=512, write_parallelism=1, max_rooms=3
    )
    for event, pause in steps:
        bench.now += pause
        bench.do(event)
    bench.do(send_events.Stop())
    for number in range(1, 200):
        bench.do(send_events.Staged(number))
        bench.do(send_events.Wrote(number))
    assert bench.at_rest()


answers = st.one_of(
    st.builds(Landed, small, numbers),
    st.builds(Cancelled, small, numbers),
    st.builds(Refused, small, numbers, st.just(receive_bench.REASON)),
    st.builds(Stalled, small, numbers, st.just(receive_bench.REASON)),
    st.sampled_from([Pong(), Stale(4000), Stale(4001), Ping()]),
)
WRITERS = (4000, 4001, 4002)
incarnations = st.sampled_from(WRITERS)
receive_input = st.one_of(
    st.builds(
        receive.FromSender,
        st.sampled_from([receive_bench.ENDPOINT, "tcp://nobody"]),
        incarnations,
        st.sampled_from([0, 9, receive_bench.ME]),
        answers,
    ),
    st.builds(
        lambda room, who, transport: receive.Opened(receive_bench.opening(room, who), transport),
        small,
        incarnations,
        st.sampled_from(["shm", "shm", None]),
    ),
    st.builds(receive.Abandoned, small),
    st.just(receive.Tick()),
)


@given(st.lists(st.tuples(receive_input, times), max_size=60))
@settings(max_examples=200)
def test_a_prefill_rank_takes_anything(steps: list[tuple[receive.ReceiveEvent, float]]) -> None:
    bench = receive_bench.Bench(max_rooms=3)
    for event, pause in steps:
        bench.now += pause
        bench.do(event)
    bench.do(receive.Stop())
    for writer in WRITERS:
        bench.hear(Stale(writer), 5000)
    bench.run(bench.now + receive_bench.FENCE_S)
    assert bench.machine.idle()
