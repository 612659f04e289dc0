"""``/``, ``/dashboard`` and their assets: files of the package, served with security headers."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from rag_service.errors import ApiError

router = APIRouter(include_in_schema=False)
WEB = Path(__file__).resolve().parent.parent / "web"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@router.get("/")
async def chat_page() -> Response:
    """The chat page."""
    return page("index.html")


@router.get("/dashboard")
async def dashboard_page() -> Response:
    """The analysts' page."""
    return page("dashboard.html")


@router.get("/web/plotly.js")
async def charts() -> Response:
    """Plotly's own script, from the installed package: nothing of it is kept here, nothing comes from afar."""
    file = Path(
        str(importlib.metadata.distribution("plotly").locate_file("plotly/package_data/plotly.min.js"))
    )
    # Nearly 5 MB, and another only after an upgrade.
    return FileResponse(file, headers={**SECURITY_HEADERS, "Cache-Control": "public, max-age=86400"})


@router.get("/web/{path:path}")
async def asset(path: str) -> Response:
    """A script, style or picture of the pages."""
    return page(path)


@router.get("/favicon.ico")
async def icon() -> Response:
    """The pages' icon, or nothing."""
    return page("favicon.svg") if (WEB / "favicon.svg").is_file() else Response(status_code=204)


def page(name: str) -> Response:
    """The file ``name`` of the package. Raises a 404 for anything outside it."""
    file = (WEB / name).resolve() if "\0" not in name else WEB
    if not file.is_relative_to(WEB) or not file.is_file():
        raise ApiError(404, "There is no such page.", code="not_found")
    return FileResponse(file, headers={**SECURITY_HEADERS, "Cache-Control": "no-cache"})
