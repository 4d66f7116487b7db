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
from llmtrain.page.actions import act, possible_actions
from llmtrain.page.downsample import SMOOTHING
from llmtrain.page.log_file import line_begin, read_chunk, search
from llmtrain.page.run_catalog import NotFound, RunCatalog
from llmtrain.page.run_groups import RunGroups
from llmtrain.page.run_values import end_sample, score_curves, shown_config
from llmtrain.page.security import Access, AccessCheck, read_cookie
from llmtrain.page.series import AXES, EVAL, TRAIN
from llmtrain.page.stream import ListEvents, RunEvents
from llmtrain.page.sweeps import sweep_details, sweep_list
from llmtrain.page.values import flat, json_text, message

STATIC = Path(__file__).parent / "static"
MAX_COLUMNS = 4000
SOURCE_COLUMNS = 800
"""Of curves whose charts the page does not know yet when it asks."""
MAX_RUNS = 20
"""Runs that are compared, or whose small curves are read, in one request."""
MAX_SMOOTHING = 0.999
MAX_BODY_BYTES = 10_000
Handler = Callable[[RunCatalog, Request], Any]


def make_app(catalog: RunCatalog, access: Access) -> Starlette:
    readers: dict[str, Handler] = {
        "/api/runs": _runs,
        "/api/groups": partial(_groups, RunGroups(catalog)),
        "/api/sparks": _sparks,
        "/api/run": partial(_run, access),
        "/api/curves": _curves,
        "/api/ranks": _ranks,
        "/api/why": _why,
        "/api/config": _config,
        "/api/samples": _samples,
        "/api/log": _log,
        "/api/log/search": _search,
        "/api/sweeps": lambda catalog, _: {"sweeps": sweep_list(catalog.local.root)},
        "/api/sweep": _sweep,
    }
    routes = [
        Route("/", lambda _: FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})),
        Route("/api/session", partial(_session, catalog, access)),
        *(Route(path, _json(catalog, read)) for path, read in readers.items()),
        Route("/api/stream", partial(_stream, catalog)),
        Route("/api/actions", partial(_act, catalog), methods=["POST"]),
        Mount("/static", _Static(directory=STATIC)),
    ]
    middleware = [
        Middleware(AccessCheck, access=access),  # outermost: it answers also for static files and unknown paths
        Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
    ]
    return Starlette(routes=routes, middleware=middleware)


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


class _Static(StaticFiles):
    def file_response(self, *words: Any, **options: Any) -> Response:
        response = super().file_response(*words, **options)
        response.headers["cache-control"] = "no-cache"  # asked again, by ETag: an update of llmtrain changes the files
        return response


def _json(catalog: RunCatalog, read: Handler) -> Callable[[Request], Response]:
    """A route that sends what `read` returns. Not a coroutine, so it runs in a thread."""

    def answer(request: Request) -> Response:
        try:
            return _Json(read(catalog, request))
        except NotFound as problem:
            return _Json(message(problem), 404)
        except ClusterError as problem:
            return _Json(message(problem), 503)
        except LlmtrainError as problem:
            return _Json(message(problem), 400)
        except FileNotFoundError:
            return _Json({"what": "The file does not exist any more.", "remedy": None}, 404)
        except OSError as problem:
            return _Json({"what": f"Cannot read the run: {problem.strerror or problem}.", "remedy": None}, 500)

    return answer


def _session(catalog: RunCatalog, access: Access, request: Request) -> Response:
    """What the page must know once: what it may do, and where it reads."""
    csrf = None
    if access.allow_actions:
        headers = {name.lower(): value for name, value in request.headers.items()}
        csrf = access.csrf_token(read_cookie(headers, access.cookie_name))
    cluster = None
    if catalog.cluster:
        cluster = {"name": catalog.cluster.name, "namespace": catalog.cluster.namespace}
    return _Json({"csrf": csrf, "root": catalog.local.root, "cluster": cluster, "now": time.time()})


def _runs(catalog: RunCatalog, request: Request) -> Any:
    return catalog.list_since(request.query_params.get("since", ""))


def _groups(groups: RunGroups, _: RunCatalog, request: Request) -> Any:
    """Runs that a filter leaves, in groups with equal values of `field`, repeated."""
    query = request.query_params
    return groups.read(query.getlist("field"), query.get("text", ""), query.get("state", ""))


def _sweep(catalog: RunCatalog, request: Request) -> Any:
    return sweep_details(catalog.local.root, request.query_params.get("name", ""))


def _ranks(catalog: RunCatalog, request: Request) -> Any:
    return {"ranks": [vars(rank) for rank in catalog.ranks(_key(request))]}


def _why(catalog: RunCatalog, request: Request) -> Any:
    return {"why": catalog.why(_key(request))}


def _run(access: Access, catalog: RunCatalog, request: Request) -> Any:
    row = catalog.row(_key(request))
    actions = possible_actions(row) if access.allow_actions else []
    return {"row": row, "details": catalog.details(row["key"]), "actions": actions}


async def _act(catalog: RunCatalog, request: Request) -> Response:
    """AccessCheck has checked that actions are allowed and that the request comes from the page."""
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
    read = _json(catalog, lambda catalog, _: {"output": act(catalog, *words)})
    return await run_in_threadpool(read, request)


def _sparks(catalog: RunCatalog, request: Request) -> Any:
    found = {}
    for key in _keys(request):
        try:
            found[key] = catalog.spark(key)
        except NotFound:
            continue
    return found


def _curves(catalog: RunCatalog, request: Request) -> Any:
    """Curves for charts: `metric=NAME:COLUMNS`, repeated; optionally only `from` to `to`. Those that only some runs
    have, of scores on tasks and of the sources of a mixture, are always there."""
    query = request.query_params
    key = _key(request)
    axis = query.get("axis", "step")
    if axis not in AXES:
        raise HTTPException(400, "axis")
    start = _number(request, "from")
    end = _number(request, "to")
    smooth = _number(request, "smooth")  # without one, the default for a curve of this length
    weight = SMOOTHING if smooth is None else min(MAX_SMOOTHING, max(0.0, smooth))
    series = catalog.metrics(key)
    curves = {}
    for text in query.getlist("metric")[: len(TRAIN) + len(EVAL)]:
        name, _, columns = text.partition(":")
        if name not in (*TRAIN, *EVAL) or not columns.isdecimal():
            raise HTTPException(400, "metric")
        pixels = min(MAX_COLUMNS, max(1, int(columns[:6])))
        smoothing = weight if name == "train/loss" else 0.0
        curves[name] = series.curve(name, axis, pixels, start, end, smoothing, is_exact=smooth is not None)
    curves |= series.source_curves(axis, SOURCE_COLUMNS, start, end)
    curves |= score_curves(catalog.scores(key), lambda step: series.axis_at(step, axis))
    places = [{**mark, "x": series.axis_at(mark["step"], axis)} for mark in catalog.details(key)["marks"]]
    return {
        "position": series.position,
        "time_base": series.time_base,
        "curves": curves,
        "marks": places,
    }


def _config(catalog: RunCatalog, request: Request) -> Any:
    return {"config": flat(shown_config(catalog.view(_key(request))))}


def _samples(catalog: RunCatalog, request: Request) -> Any:
    view = catalog.view(_key(request))
    if request.query_params.get("step") == "end":
        return {"samples": end_sample(view)}
    return {"samples": view.samples(_whole(request, "step"))}


def _log(catalog: RunCatalog, request: Request) -> Any:
    """The end of a log; or what is before or after a byte; or the line at a byte and what follows."""
    key = _key(request)
    rank = _whole(request, "rank")
    path = catalog.log_path(key, rank)
    if "before" in request.query_params:
        return read_chunk(path, before=_whole(request, "before"))
    if "at" in request.query_params:
        return read_chunk(path, after=line_begin(path, _whole(request, "at")))
    if "after" in request.query_params:
        return read_chunk(path, after=_whole(request, "after"))
    return {**read_chunk(path), "note": catalog.log_note(key, rank)}


def _search(catalog: RunCatalog, request: Request) -> Any:
    text = request.query_params.get("text", "")[:200]
    path = catalog.log_path(_key(request), _whole(request, "rank"))
    return search(path, text) if text else {"matches": [], "is_complete": True}


async def _stream(catalog: RunCatalog, request: Request) -> Response:
    query = request.query_params
    position = request.headers.get("last-event-id") or query.get("from", "")
    if query.get("view") == "run":
        rank = query.get("log", "")
        log_rank = int(rank) if rank.isdecimal() and len(rank) < 8 else None
        events = RunEvents(catalog, _keys(request), position, query.get("ranks") == "1", log_rank).stream()
    else:
        events = ListEvents(catalog, position).stream()
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
