# SPDX-License-Identifier: Apache-2.0
"""A small blocking client of a host engine's HTTP server, on the standard library alone.

Owns requests, responses and the shape of messages. Knows nothing of processes or transfers. Every
call opens its own connection, so any thread may call.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

JSONValue = None | bool | int | float | str | Sequence["JSONValue"] | Mapping[str, "JSONValue"]
Message = Mapping[str, JSONValue]

GREEDY: Mapping[str, JSONValue] = {
    "temperature": 0.0,
    "max_tokens": 32,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""Sent with every chat unless a field overrides it: exact, always as long as asked, ids named."""


@dataclass(frozen=True)
class ChatResult:
    """What one chat request came to."""

    status: int
    """HTTP status; in a stream an error event counts as 500."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache, if the engine reports them, else 0."""
    ec_transfer_params: Mapping[str, JSONValue] | None = None
    """What the connector returned; never set in a streamed answer."""
    ttft_s: float | None = None
    """Seconds from sending to the first token; streamed answers only."""
    seconds: float = 0.0
    error: str = ""
    """The server's message when `ok` is false."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.finish_reason not in ("", "error", "abort")


def user_message(prompt: str, items: Sequence[str] = ()) -> list[Message]:
    """One user message: the data URLs of `items` in order, then `prompt`.

    A URL of a video (`data:video/...`) becomes a video part, any other an image part.
    """
    parts: list[JSONValue] = [item_part(url) for url in items]
    parts.append({"type": "text", "text": prompt})
    return [{"role": "user", "content": parts}]


def item_part(url: str) -> Mapping[str, JSONValue]:
    """The content part of one item given by its data URL."""
    kind = "video_url" if url.startswith("data:video/") else "image_url"
    return {"type": kind, kind: {"url": url}}


def item_parts(messages: Sequence[Message]) -> list[Mapping[str, JSONValue]]:
    """The media parts of `messages`, in prompt order: what rooms are counted by."""
    found: list[Mapping[str, JSONValue]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) or not isinstance(content, Sequence):
            continue
        found.extend(p for p in content if isinstance(p, Mapping) and p.get("type") != "text")
    return found


def chat(
    address: tuple[str, int],
    messages: Sequence[Message],
    *,
    stream: bool = False,
    timeout_s: float = 120.0,
    fields: Mapping[str, JSONValue] | None = None,
) -> ChatResult:
    """Post one chat completion, greedy unless `fields` says otherwise, and wait for its end.

    An HTTP error status is a result, not an exception. Raises OSError when the server cannot be
    reached, closes early, or is silent for `timeout_s`.
    """
    body = {**GREEDY, "messages": messages, "stream": stream, **(fields or {})}
    if stream:
        body["stream_options"] = {"include_usage": True}
    started = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read().decode(errors="replace")
            return ChatResult(response.status, error=_error_text(text), seconds=_since(started))
        if stream:
            return _read_stream(_events(response), started)
        return _read_answer(json.loads(response.read()), started)
    except http.client.HTTPException as error:
        raise ConnectionError(
            f"{address[0]}:{address[1]} broke off its answer: {error!r}"
        ) from error
    finally:
        connection.close()


def get(address: tuple[str, int], path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Fetch `path`; returns status and body. Raises OSError as `chat` does."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{address[0]}:{address[1]}{path}: {error!r}") from error
    finally:
        connection.close()


def parse_metrics(text: str) -> dict[str, float]:
    """Values of a Prometheus page by metric name, summed over their labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _since(started: float) -> float:
    return time.monotonic() - started


def _error_text(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()


def _read_answer(answer: dict[str, object], started: float) -> ChatResult:
    choice = _first_choice(answer)
    message = choice.get("message")
    params = answer.get("ec_transfer_params")
    prompt, cached = _usage(answer)
    return ChatResult(
        status=200,
        token_ids=_token_ids(choice),
        text=str(message.get("content") or "") if isinstance(message, dict) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        ec_transfer_params=params if isinstance(params, dict) else None,
        seconds=_since(started),
        prompt_tokens=prompt,
        cached_tokens=cached,
    )


def _read_stream(events: Iterator[dict[str, object]], started: float) -> ChatResult:
    tokens: list[int] = []
    text = reason = ""
    ttft: float | None = None
    prompt = cached = 0
    for event in events:
        if "error" in event:
            return ChatResult(500, error=_error_text(json.dumps(event)), seconds=_since(started))
        if event.get("usage"):
            prompt, cached = _usage(event)
        choice = _first_choice(event)
        new = _token_ids(choice)
        if new and ttft is None:
            ttft = _since(started)
        tokens.extend(new)
        delta = choice.get("delta")
        text += str(delta.get("content") or "") if isinstance(delta, dict) else ""
        reason = str(choice.get("finish_reason") or reason)
    return ChatResult(
        200, tuple(tokens), text, reason, prompt, cached, ttft_s=ttft, seconds=_since(started)
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
    for raw in response:
        line = raw.decode(errors="replace").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _first_choice(answer: Mapping[str, object]) -> dict[str, object]:
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    return {}


def _token_ids(choice: Mapping[str, object]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    return tuple(int(i) for i in ids) if isinstance(ids, list) else ()


def _usage(answer: Mapping[str, object]) -> tuple[int, int]:
    """Prompt tokens, and how many of them came from the prefix cache."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return 0, 0
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return int(usage.get("prompt_tokens", 0)), int(cached or 0)
