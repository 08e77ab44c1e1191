# SPDX-License-Identifier: Apache-2.0
"""The page that `epd inspect` prints, and the keys of its JSON: both as documented."""

import json
import re
from pathlib import Path

import msgspec

from epd_connector.cli.inspect import as_text
from epd_connector.core.describe import describe_prefill, describe_sender
from epd_connector.protocol.state import (
    EncodeState,
    EngineState,
    FailureState,
    PrefillState,
    ProcessState,
    RankState,
    SendState,
    State,
)
from epd_connector.stats import Counters
from tests.unit.admission_harness import item, known, settings
from tests.unit.send_bench import Bench as SendBench

DOCS = Path(__file__).parents[2] / "docs" / "inspect.md"
MIB = 1 << 20


def engine(
    *,
    failures: tuple[FailureState, ...] = (),
    prefill: PrefillState | None = None,
    encode: EncodeState | None = None,
    send: SendState | None = None,
) -> EngineState:
    process = ProcessState(pid=7, threads=3, descriptors=11, resident_bytes=3 * MIB)
    return EngineState(
        role="ec_both",
        address="10.0.0.1:14579",
        protocol=1,
        version="0.1.0",
        incarnation="0" * 15 + "1",
        fingerprint="model/a",
        uptime_s=3725.0,
        ranks_expected=2,
        ranks_up=1,
        process=process,
        counters=Counters().snapshot() | {"rooms_opened": 12.0},
        failures=failures,
        prefill=prefill,
        encode=encode,
        ranks=(RankState(0, "2", "tcp://10.0.0.1:9", ("shm", "mooncake"), process, send, None),),
        silent_ranks=(1,),
    )


def test_the_page_says_who_the_engine_is_and_what_it_counted() -> None:
    lines = as_text(engine(encode=EncodeState("float16", {"video": 9, "image": 8}))).splitlines()
    assert lines[0] == "ec_both at 10.0.0.1:14579, 1 of 2 ranks up, for 1h02"
    assert "  gives rows   image 8, video 9 elements of float16" in lines
    assert "  head         pid 7, 3 threads, 11 descriptors, 3 MiB" in lines
    assert "  rooms_opened 12" in lines
    assert lines[-1] == "ranks that did not answer: 1"


def test_a_failure_is_shown_to_its_end_the_newest_first() -> None:
    reason = "word " * 90 + "remedy"
    old = tuple(FailureState(float(100 - n), f"failure {n}") for n in range(20))
    lines = as_text(engine(failures=(*old, FailureState(2.0, reason)))).splitlines()
    assert all(len(line) <= 120 for line in lines)
    first = lines.index("last failures, newest first") + 1
    assert lines[first].startswith("     2.0 s ago  word word")
    assert "remedy" in " ".join(lines[first : first + 6])
    assert sum("failure " in line for line in lines) == 7


def test_a_long_table_is_cut_and_says_how_much_more_there_is() -> None:
    bench = SendBench()
    for number in range(64):
        bench.claim(number, hash=f"{number:020}")
    lines = as_text(engine(send=describe_sender(bench.machine, 5.0))).splitlines()
    shown = [line for line in lines if "  claimed " in line]
    assert len(shown) == 20
    assert "    0000000000000000  claimed       5.0 s  10 rows of 0000000000000000, " in shown[0]
    assert lines[lines.index(shown[-1]) + 1] == "    ... 44 more"
    assert "  rooms          64 claimed" in lines


def test_names_of_a_clients_choice_do_not_steer_the_terminal() -> None:
    head = known()
    head.start("\x1b[2J\r\nrequest", item("\x1b[31mitem", 5))
    failure = FailureState(1.0, "item \x1b[31m: \x07timeout\nnext")
    page = as_text(engine(failures=(failure,), prefill=describe_prefill(head.head, head.now)))
    assert all(c.isprintable() for line in page.split("\n") for c in line)
    assert "?[2J??request  for ?[31mitem" in page
    assert "item ?[31m: ?timeout next" in page


def test_a_request_of_many_items_is_one_line() -> None:
    head = known(settings(slab_rows=100))
    head.start("r", *(item(f"item-{n}", n + 5) for n in range(20)))
    head.now += 4.0
    page = as_text(engine(prefill=describe_prefill(head.head, head.now)))
    (line,) = [line for line in page.splitlines() if line.startswith("    waiting")]
    assert line.startswith("    waiting     4.0 s  r  for item-0, item-1, ")


def test_every_key_is_documented() -> None:
    text = DOCS.read_text()
    documented = set(re.findall(r"`(?:[a-z]+(?:\[\])?\.)*([a-z_]+)`", text))
    kinds: list[type[State]] = [EngineState]
    for kind in kinds:
        fields = msgspec.structs.fields(kind)
        missing = {field.encode_name for field in fields} - documented
        assert not missing, f"{kind.__name__}: {missing}"
        for other in State.__subclasses__():
            if other not in kinds and any(other.__name__ in str(f.type) for f in fields):
                kinds.append(other)
    assert set(kinds) == set(State.__subclasses__())


def test_the_documented_example_is_one() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    example = msgspec.json.decode(text, type=EngineState)
    assert json.loads(msgspec.json.encode(example)).keys() == json.loads(text).keys()
    assert example.prefill is not None
    slab = example.prefill.slab
    used = slab.free + slab.leased + slab.landed + slab.resident + slab.quarantined
    assert used == slab.capacity
