"""The page and its JSON, read-only: `/`, `/api/runs` and `/api/runs/{name}?cursor=...`."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedpsa_strategy.watch.dashboard.library import Library

_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript")
        for name in ("app", "chart", "charts", "curves", "detail", "picker", "save", "state")
    },
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    # A chart becomes a picture by way of a blob of the page's own.
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob:; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_app(library: Library, *, loopback: bool) -> Starlette:
    """Return the web application.

    With `loopback` only this machine can reach it: then requests for other host names are refused.
    """

    # Plain functions: Starlette runs them in threads, so a long file blocks nothing.
    def static(request: Request) -> Response:
        name, kind = _FILES[request.url.path]
        return Response((_STATIC / name).read_bytes(), media_type=kind)

    def list_runs(request: Request) -> Response:  # noqa: ARG001
        runs = library.runs().items()
        return _json(
            {
                "folders": [str(folder) for folder in library.folders],
                "runs": [{"name": name, **run.head()} for name, run in runs],
            }
        )

    def show_run(request: Request) -> Response:
        name = request.path_params["name"]
        run = library.runs().get(name)  # a name is looked up, never made into a path
        if run is None:
            return _json({"error": f"there is no run {name!r}"}, 404)
        snapshot = run.snapshot(request.query_params.get("cursor", ""))
        return Response(status_code=204) if snapshot is None else _json(snapshot)

    return Starlette(
        routes=[
            *(Route(path, static) for path in _FILES),
            Route("/api/runs", list_runs),
            Route("/api/runs/{name}", show_run),
        ],
        middleware=[Middleware(Guard, loopback=loopback), Middleware(GZipMiddleware)],
    )


class Guard:
    """Refuses requests for foreign host names, and adds headers that keep browsers strict.

    A page on the internet can let its own name point to 127.0.0.1 and then read what is served
    there (DNS rebinding); the Host header gives it away.
    """

    def __init__(self, app: ASGIApp, loopback: bool) -> None:
        self.app = app
        self.loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self.app
        if scope["type"] == "http" and self.loopback and not _is_local(Headers(scope=scope)):
            app = PlainTextResponse("This dashboard answers only to localhost.\n", 403)
        await app(scope, receive, send_with_headers)


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address means this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(headers: Headers) -> bool:
    try:
        return is_loopback(urlsplit("//" + headers.get("host", "")).hostname or "")
    except ValueError:
        return False


def _json(value: object, status: int = 200) -> Response:
    # ASCII, because texts in damaged files may hold what UTF-8 cannot.
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")
