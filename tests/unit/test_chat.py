# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of the engine harness, against a real server on the loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from epd_connector.testing.chat import chat, get, item_parts, parse_metrics, user_message
from epd_connector.testing.engines import epd_params, mint_room
from epd_connector.testing.ports import Ports

ANSWER = {
    "choices": [{"message": {"content": "ab"}, "finish_reason": "length", "token_ids": [1, 2]}],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
    "ec_transfer_params": {"item": {}},
}
EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]},
    {"choices": [{"delta": {"content": "b"}, "token_ids": [2], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 9}},
]


class Handler(BaseHTTPRequestHandler):
    """Answers by the `model` field: plain, streamed, refused, or a stream that fails."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match request["model"]:
            case "refuse":
                self._reply(400, json.dumps({"error": {"message": "no such room"}}))
            case "fail":
                self._reply(200, 'data: {"error": {"message": "lost", "code": 500}}\n\n')
            case "stream":
                assert request["stream"] is True
                lines = [f"data: {json.dumps(event)}\n\n" for event in EVENTS]
                self._reply(200, "".join([*lines, "data: [DONE]\n\n"]))
            case _:
                assert (request["temperature"], request["max_tokens"]) == (0.0, 3)
                self._reply(200, json.dumps(ANSWER))

    def do_GET(self) -> None:
        self._reply(200, self.path)

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_a_plain_answer(address: tuple[str, int]) -> None:
    result = chat(address, user_message("hi"), fields={"model": "plain", "max_tokens": 3})
    assert result.ok
    assert (result.token_ids, result.text, result.finish_reason) == ((1, 2), "ab", "length")
    assert (result.prompt_tokens, result.cached_tokens) == (9, 4)
    assert result.ec_transfer_params == {"item": {}}
    assert result.ttft_s is None


def test_a_streamed_answer_has_a_time_to_first_token(address: tuple[str, int]) -> None:
    result = chat(address, user_message("hi"), stream=True, fields={"model": "stream"})
    assert result.ok
    assert (result.token_ids, result.text, result.prompt_tokens) == ((1, 2), "ab", 9)
    assert result.ttft_s is not None


@pytest.mark.parametrize(
    ("model", "stream", "status", "error"),
    [("refuse", False, 400, "no such room"), ("fail", True, 500, "lost")],
)
def test_a_failure_is_a_result(
    address: tuple[str, int], model: str, stream: bool, status: int, error: str
) -> None:
    result = chat(address, user_message("hi"), stream=stream, fields={"model": model})
    assert (result.ok, result.status, result.error) == (False, status, error)


def test_a_server_that_is_not_there_is_an_oserror(address: tuple[str, int]) -> None:
    assert get(address, "/health") == (200, "/health")
    with pytest.raises(OSError, match="refused"):
        get(("127.0.0.1", Ports(1).first), "/health")


def test_metrics_are_summed_over_labels() -> None:
    page = '# HELP x y\nx{a="1 2"} 1.5\nx{a="2"} 2\ny 3e2\n'
    assert parse_metrics(page) == {"x": 3.5, "y": 300.0}


def test_items_are_found_in_prompt_order() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        *user_message("compare", ["data:image/png;base64,A", "data:video/mp4;base64,B"]),
    ]
    assert [part["type"] for part in item_parts(messages)] == ["image_url", "video_url"]


def test_rooms_are_sixteen_hex_digits_below_two_to_the_63rd() -> None:
    rooms = {mint_room() for _ in range(200)}
    assert len(rooms) == 200
    assert all(len(room) == 16 and int(room, 16) < 1 << 63 for room in rooms)


def test_entries_keep_their_order_and_nulls() -> None:
    params = epd_params([("00000000000000ff", "h:1"), None])
    assert params == {"epd": [{"room": "00000000000000ff", "encode": "h:1"}, None]}
