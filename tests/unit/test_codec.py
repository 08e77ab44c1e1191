# SPDX-License-Identifier: Apache-2.0
"""The wire format: what is sent arrives, and nothing else is ever let in."""

import contextlib
import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from epd_connector.errors import Code, Failure, ProtocolError
from epd_connector.protocol.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, Codec
from epd_connector.protocol.frames import (
    MAX_FRAMES,
    AnyFrame,
    Envelope,
    Frame,
    Ping,
    Refused,
    Report,
    SkipRooms,
)

KINDS: tuple[type[Frame], ...] = typing.get_args(AnyFrame)
KEY = b"a key of sixteen bytes"
CODECS = [Codec(), Codec(KEY)]
ENVELOPE = Envelope(1, 2, Ping())


def values(kind: inspect.Type) -> st.SearchStrategy[typing.Any]:
    """Every value that the wire allows for a field of type ``kind``, edges included."""
    match kind:
        case inspect.IntType(ge=low, le=high, lt=below):
            return st.integers(low, high if high is not None else (below or 1 << 63) - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType(max_length=most):
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=most or 30)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.DictType(key_type=key, value_type=value, max_length=most):
            return st.dictionaries(values(key), values(value), max_size=min(most or 4, 4))
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            items = st.lists(values(item), min_size=least or 0, max_size=min(most or 4, 4))
            return items.map(tuple)
        case inspect.UnionType(types=types):
            some = [values(t) for t in types if not isinstance(t, inspect.NoneType)]
            return st.one_of(st.none(), *some)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, *[values(field.type) for field in fields])
    raise AssertionError(f"no strategy for {kind}")


frames = st.one_of([values(inspect.type_info(kind)) for kind in KINDS])
ids = st.integers(0, (1 << 63) - 1)
envelopes = st.builds(Envelope, ids, ids, frames, st.lists(frames, max_size=3).map(tuple))


def raw(frame: msgspec.Struct) -> bytes:
    """Bytes of ``frame`` as a peer would send them that does not care for bounds."""
    return b"EP" + bytes((PROTOCOL_VERSION, 0)) + msgspec.msgpack.encode((1, 2, frame))


def test_an_envelope_holds_so_many_frames_and_no_more() -> None:
    full = Envelope(1, 2, Ping(), (Ping(),) * (MAX_FRAMES - 1))
    assert len(Codec().decode(Codec().encode(full)).frames()) == MAX_FRAMES
    with pytest.raises(ProtocolError):
        Codec().decode(Codec().encode(Envelope(1, 2, Ping(), (Ping(),) * MAX_FRAMES)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=10)
def test_every_frame_comes_back_as_it_was(kind: type[Frame], data: st.DataObject) -> None:
    envelope = Envelope(data.draw(ids), data.draw(ids), data.draw(values(inspect.type_info(kind))))
    for codec in CODECS:
        assert codec.decode(codec.encode(envelope)) == envelope


def smallest(kind: inspect.Type) -> object:
    """One value that the wire allows for a field of type ``kind``."""
    match kind:
        case inspect.IntType(ge=low):
            return low
        case inspect.EnumType(cls=cls):
            return next(iter(cls))
        case inspect.VarTupleType(item_type=item, min_length=least):
            return [smallest(item)] * (least or 0)
        case inspect.StructType(cls=cls, fields=fields):
            return cls(*[smallest(field.type) for field in fields])
        case inspect.StrType():
            return ""
        case inspect.DictType():
            return {}
        case inspect.UnionType():
            return None
    return False if isinstance(kind, inspect.BoolType) else 0.0


def beyond(kind: inspect.Type) -> list[object]:
    """Values just outside what the wire allows for a field of type ``kind``."""
    match kind:
        case inspect.IntType(ge=low, le=high, lt=below):
            assert low is not None, "an integer on the wire has a lower bound"
            top = high + 1 if high is not None else below
            assert top is not None, "an integer on the wire has an upper bound"
            return [low - 1, top, "1", 1.5, None]
        case inspect.StrType(max_length=int(most)):
            return ["x" * (most + 1), 1, None, b"x"]
        case inspect.DictType(max_length=most):
            assert most is not None, "a table on the wire has an upper bound"
            return [{str(n): "" for n in range(most + 1)}, [], None]
        case inspect.VarTupleType(min_length=least, max_length=most):
            assert most is not None, "a list on the wire has an upper bound"
            return [[None] * (most + 1), {}, None, *([[]] if least else [])]
        case inspect.StructType() | inspect.BoolType():
            return [None, 7]
    return []


def mutants() -> list[typing.Any]:
    made = []
    for kind in KINDS:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        for place, field in enumerate(info.fields):
            for number, value in enumerate(beyond(field.type)):
                name = f"{kind.__name__}-{field.name}-{number}"
                made.append(pytest.param(info, place, value, id=name))
    return made


@pytest.mark.parametrize(("info", "place", "value"), mutants())
def test_no_field_takes_a_value_outside_its_bounds(
    info: inspect.StructType, place: int, value: object
) -> None:
    fields = [smallest(field.type) for field in info.fields]
    assert Codec().decode(raw(info.cls(*fields)))
    fields[place] = value
    with pytest.raises(ProtocolError):
        Codec().decode(raw(info.cls(*fields)))


def test_a_failure_has_a_known_code() -> None:
    good, bad = (raw(Refused(1, 1, Failure(code, "r"))) for code in (Code.STALE, "no such code"))  # type: ignore[arg-type]
    assert Codec().decode(good)
    with pytest.raises(ProtocolError, match="no such code"):
        Codec().decode(bad)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_worse(payload: bytes) -> None:
    for codec in CODECS:
        with pytest.raises(ProtocolError):
            codec.decode(payload)


@given(st.binary(max_size=400))
def test_random_bytes_behind_a_right_header_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Codec().decode(b"EP" + bytes((PROTOCOL_VERSION, 0)) + body)


@given(envelopes, st.data())
def test_a_damaged_frame_is_refused_or_is_some_frame(
    envelope: Envelope, data: st.DataObject
) -> None:
    payload = bytearray(Codec().encode(envelope))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(Codec().decode(bytes(payload)), Envelope)


@given(envelopes, st.data())
def test_a_signed_frame_has_no_bit_that_can_be_changed(
    envelope: Envelope, data: st.DataObject
) -> None:
    payload = bytearray(Codec(KEY).encode(envelope))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        Codec(KEY).decode(bytes(payload))


@pytest.mark.parametrize("codec", CODECS, ids=["open", "signed"])
@given(envelopes)
@settings(max_examples=30)
def test_a_frame_cut_anywhere_is_refused(codec: Codec, envelope: Envelope) -> None:
    payload = codec.encode(envelope)
    for length in range(min(len(payload), 300)):
        with pytest.raises(ProtocolError):
            codec.decode(payload[:length])
    for extra in (b"\0", b"\xc0" * 16):
        with pytest.raises(ProtocolError):
            codec.decode(payload + extra)


@pytest.mark.parametrize(
    ("sender", "receiver", "message"),
    [
        (Codec(KEY), Codec(), "peer signs its frames and this process does not: .*same auth_key"),
        (Codec(), Codec(KEY), "this process signs its frames and peer does not: .*same auth_key"),
        (Codec(KEY), Codec(KEY[::-1]), "signed with another key: give both the same auth_key"),
    ],
)
def test_keys_that_differ_are_named_with_the_remedy(
    sender: Codec, receiver: Codec, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        receiver.decode(sender.encode(ENVELOPE))


@pytest.mark.parametrize("codec", CODECS, ids=["open", "signed"])
def test_another_version_is_named_with_the_remedy(codec: Codec) -> None:
    payload = bytearray(codec.encode(ENVELOPE))
    payload[2] = PROTOCOL_VERSION + 1
    message = f"version {PROTOCOL_VERSION + 1}, this process {PROTOCOL_VERSION}: install the same"
    with pytest.raises(ProtocolError, match=message):
        codec.decode(bytes(payload))


def test_a_frame_of_something_else_is_told_apart() -> None:
    with pytest.raises(ProtocolError, match="of 14 bytes is not of this protocol"):
        Codec().decode(b"GET / HTTP/1.1")


def test_a_huge_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_FRAME_BYTES + 1} bytes, limit"):
        Codec().decode(b"\0" * (MAX_FRAME_BYTES + 1))


def test_the_largest_frame_of_rooms_fits() -> None:
    envelope = Envelope(1, 2, SkipRooms(((1 << 63) - 1,) * 4096))
    assert Codec().decode(Codec().encode(envelope)) == envelope


def test_the_largest_report_fits() -> None:
    text = "x" * 512
    counters = {f"{text[4:]}{n:04}": 1e300 for n in range(256)}
    report = Report(text, text, 1, counters, (1e300,) * 1024, (text,) * 64)
    assert len(Codec().encode(Envelope(1, 2, report))) <= MAX_FRAME_BYTES


@given(st.text(), st.integers(1, 3000))
@example("x", MAX_FRAME_BYTES)
@settings(max_examples=50)
def test_whatever_the_reason_a_failure_that_is_sent_arrives(text: str, times: int) -> None:
    envelope = Envelope(1, 2, Refused(1, 1, Failure(Code.INTERNAL, text * times)))
    assert Codec().decode(Codec().encode(envelope)) == envelope


@pytest.mark.parametrize("depth", [10, 1000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(ProtocolError):
        Codec().decode(b"EP" + bytes((PROTOCOL_VERSION, 0)) + b"\x91" * depth)
    with pytest.raises(ProtocolError):
        Codec().decode(b"EP" + bytes((PROTOCOL_VERSION, 0)) + b"\x93\x01\x02" + b"\x91" * depth)
