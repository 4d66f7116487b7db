"""The routes of the page, and the server. Everything it sends is read when it is asked for."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from llmtrain.errors import ClusterError, LlmtrainError
from llmtrain.page import collect
from llmtrain.page.actions import act, possible_actions
from llmtrain.page.hub import Hub, NotFound
from llmtrain.page.log_file import line_begin, read_chunk, search
from llmtrain.page.security import Access, Guard, read_cookie
from llmtrain.page.series import AXES, EVAL, TRAIN
from llmtrain.page.stream import ListEvents, RunEvents
from llmtrain.page.values import flat, json_text, message

STATIC = Path(__file__).parent / "static"
MAX_COLUMNS = 4000
MAX_RUNS = 20
"""Runs that are compared, or whose small curves are read, in one request."""
MAX_SMOOTHING = 0.999
MAX_BODY_BYTES = 10_000
Handler = Callable[[Hub, Request], Any]


def make_app(hub: Hub, access: Access) -> Starlette:
    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})),
        Route("/api/session", partial(_session, hub, access)),
        Route("/api/runs", _json(hub, lambda hub, request: hub.list_since(request.query_params.get("since", "")))),
        Route("/api/sparks", _json(hub, _sparks)),
        Route("/api/run", _json(hub, partial(_run, access))),
        Route("/api/curves", _json(hub, _curves)),
        Route("/api/ranks", _json(hub, lambda hub, request: {"ranks": hub.ranks(_key(request))})),
        Route("/api/why", _json(hub, lambda hub, request: {"why": hub.why(_key(request))})),
        Route("/api/config", _json(hub, _config)),
        Route("/api/samples", _json(hub, _samples)),
        Route("/api/log", _json(hub, _log)),
        Route("/api/log/search", _json(hub, _search)),
        Route("/api/stream", partial(_stream, hub)),
        Route("/api/actions", partial(_act, hub), methods=["POST"]),
        Mount("/static", _Static(directory=STATIC)),
    ]
    middleware = [Middleware(Guard, access=access), Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)]
    return Starlette(routes=routes, middleware=middleware)


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


class _Static(StaticFiles):
    def file_response(self, *words: Any, **options: Any) -> Response:
        response = super().file_response(*words, **options)
        response.headers["cache-control"] = "no-cache"  # asked again, by ETag: an update of llmtrain changes the files
        return response


def _json(hub: Hub, read: Handler) -> Callable[[Request], Response]:
    """A route that sends what `read` returns. Not a coroutine, so it runs in a thread."""

    def answer(request: Request) -> Response:
        try:
            return _Json(read(hub, request))
        except NotFound as problem:
            return _Json(message(problem), 404)
        except LlmtrainError as problem:
            return _Json(message(problem), 503 if isinstance(problem, ClusterError) else 400)
        except FileNotFoundError:
            return _Json({"what": "The file does not exist any more.", "remedy": None}, 404)
        except OSError as problem:
            return _Json({"what": f"Cannot read the run: {problem.strerror or problem}.", "remedy": None}, 500)

    return answer


def _session(hub: Hub, access: Access, request: Request) -> Response:
    """What the page must know once: what it may do, and where it reads."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    csrf = access.csrf_token(read_cookie(headers, access.cookie_name)) if access.allow_actions else None
    cluster = {"name": hub.cluster.name, "namespace": hub.cluster.namespace} if hub.cluster else None
    return _Json({"csrf": csrf, "root": hub.local.root, "cluster": cluster, "now": time.time()})


def _run(access: Access, hub: Hub, request: Request) -> Any:
    row = hub.row(_key(request))
    actions = possible_actions(row) if access.allow_actions else []
    return {"row": row, "details": hub.details(row["key"]), "actions": actions}


async def _act(hub: Hub, request: Request) -> Response:
    """The guard has checked that actions are allowed and that the request comes from the page."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, "body")
    try:
        values = json.loads(body)
        words = [str(values[name]) for name in ("key", "action", "confirm")]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise HTTPException(400, "body") from None
    read = _json(hub, lambda hub, _: {"output": act(hub, *words)})
    return await run_in_threadpool(read, request)


def _sparks(hub: Hub, request: Request) -> Any:
    found = {}
    for key in _keys(request):
        try:
            found[key] = hub.spark(key)
        except NotFound:
            continue
    return found


def _curves(hub: Hub, request: Request) -> Any:
    """Curves for charts: `metric=NAME:COLUMNS`, repeated; optionally only `from` to `to`."""
    query, key = request.query_params, _key(request)
    axis = query.get("axis", "step")
    if axis not in AXES:
        raise HTTPException(400, "axis")
    start, end = _number(request, "from"), _number(request, "to")
    weight = min(MAX_SMOOTHING, max(0.0, _number(request, "smooth") or 0.0))
    series = hub.metrics(key)
    curves = {}
    for text in query.getlist("metric")[: len(TRAIN) + len(EVAL)]:
        name, _, columns = text.partition(":")
        if name not in (*TRAIN, *EVAL) or not columns.isdecimal():
            raise HTTPException(400, "metric")
        own = weight if name == "train/loss" else 0.0
        curves[name] = series.curve(name, axis, min(MAX_COLUMNS, max(1, int(columns[:6]))), start, end, own)
    places = [{**mark, "x": series.axis_at(mark["step"], axis)} for mark in hub.details(key)["marks"]]
    return {
        "position": series.position,
        "time_base": series.time_base,
        "curves": curves,
        "marks": places,
    }


def _config(hub: Hub, request: Request) -> Any:
    return {"config": flat(collect.resolved_config(hub.directory(_key(request))))}


def _samples(hub: Hub, request: Request) -> Any:
    return {"samples": collect.samples(hub.directory(_key(request)), _whole(request, "step"))}


def _log(hub: Hub, request: Request) -> Any:
    """The end of a log; or what is before or after a byte; or the line at a byte and what follows."""
    key, rank = _key(request), _whole(request, "rank")
    path = hub.log_path(key, rank)
    if "before" in request.query_params:
        return read_chunk(path, before=_whole(request, "before"))
    if "at" in request.query_params:
        return read_chunk(path, after=line_begin(path, _whole(request, "at")))
    if "after" in request.query_params:
        return read_chunk(path, after=_whole(request, "after"))
    return {**read_chunk(path), "note": hub.log_note(key, rank)}


def _search(hub: Hub, request: Request) -> Any:
    text = request.query_params.get("text", "")[:200]
    path = hub.log_path(_key(request), _whole(request, "rank"))
    return search(path, text) if text else {"matches": [], "is_complete": True}


async def _stream(hub: Hub, request: Request) -> Response:
    query = request.query_params
    position = request.headers.get("last-event-id") or query.get("from", "")
    if query.get("view") == "run":
        rank = query.get("log", "")
        log_rank = int(rank) if rank.isdecimal() and len(rank) < 8 else None
        events = RunEvents(hub, _keys(request), position, query.get("ranks") == "1", log_rank).stream()
    else:
        events = ListEvents(hub, position).stream()
    return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _keys(request: Request) -> list[str]:
    return request.query_params.getlist("key")[:MAX_RUNS]


def _key(request: Request) -> str:
    keys = _keys(request)
    if not keys:
        raise HTTPException(400, "key")
    return keys[0]


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > 15:
        raise HTTPException(400, name)
    return int(text)


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise HTTPException(400, name) from None
    return value if math.isfinite(value) else None
