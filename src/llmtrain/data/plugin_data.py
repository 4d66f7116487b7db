"""Checks what a dataset plugin returns, where it returns it: later only an internal error would be left."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from llmtrain.data.text_and_examples import Example, Segment, TextChunk
from llmtrain.errors import DataError
from llmtrain.plugins import plugin_errors, wrong_result


def checked_identity(kind: type[Any], identity: Callable[[], Any]) -> dict[str, Any]:
    with plugin_errors(kind, "identity", DataError):
        value = identity()
    try:
        json.dumps(value, sort_keys=True)
        is_json = isinstance(value, dict)
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        raise wrong_result(kind, "identity returned", value, "a dict that can be written as JSON", DataError)
    return dict(value)


def checked_chunks(kind: type[Any], chunks: Callable[[], Any]) -> Iterator[TextChunk]:
    for chunk in _items(kind, "chunks", chunks, "TextChunk"):
        if not isinstance(chunk, TextChunk):
            raise wrong_result(kind, "chunks yielded", chunk, "a TextChunk", DataError)
        _check_text(kind, "chunks", "TextChunk", chunk.text)
        yield chunk


def checked_examples(kind: type[Any], examples: Callable[[], Any]) -> Iterator[Example]:
    for example in _items(kind, "examples", examples, "Example"):
        if not isinstance(example, Example):
            raise wrong_result(kind, "examples yielded", example, "an Example", DataError)
        segments = example.segments
        if not isinstance(segments, list | tuple) or not all(isinstance(segment, Segment) for segment in segments):
            what = "examples yielded an Example with segments"
            raise wrong_result(kind, what, segments, "a list of Segment", DataError)
        for segment in segments:
            _check_text(kind, "examples", "Segment", segment.text)
        if not isinstance(example.source, str) or not isinstance(example.line, int):
            where = (example.source, example.line)
            what = "examples yielded an Example with source and line"
            raise wrong_result(kind, what, where, "a string and an integer", DataError)
        yield example


def _items(kind: type[Any], method: str, call: Callable[[], Any], item: str) -> Iterator[Any]:
    with plugin_errors(kind, method, DataError):
        items = call()
    if not hasattr(items, "__iter__"):
        raise wrong_result(kind, f"{method} returned", items, f"an iterator of {item}", DataError)
    with plugin_errors(kind, method, DataError):
        iterator = iter(items)
    while True:
        with plugin_errors(kind, method, DataError):
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield value


def _check_text(kind: type[Any], method: str, item: str, text: object) -> None:
    what = f"{method} yielded a {item} with text"
    if not isinstance(text, str):
        raise wrong_result(kind, what, text, "a string", DataError)
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        part = text[problem.start : problem.start + 1]
        expected = f"no surrogates (position {problem.start}), which are not Unicode text"
        raise wrong_result(kind, what, part, expected, DataError) from None
