"""A report as one HTML page that needs no network: data, styles, scripts and plotly.js are inside it."""

import re
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import fields
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path

from launch.report.data import Report
from launch.report.text import embedded

SCRIPTS = ("format.js", "table.js", "charts.js", "timeline.js", "page.js")


def page_of(report: Report, folders: Iterable[Path] = ()) -> str:
    """The page of ``report``; absolute paths, and above all ``folders``, lose their folders.

    Its content security policy admits these scripts alone, by their digests, and no network.
    """
    from plotly.offline import get_plotlyjs  # it is slow to import

    folders = list(folders)
    scripts = [get_plotlyjs(), "\n".join(_file(name) for name in SCRIPTS)]
    details = [
        f'<script type="application/json" id="detail-{detail.row}">{embedded(detail, folders)}</script>'
        for detail in report.details
    ]
    overview = {item.name: getattr(report, item.name) for item in fields(report) if item.name != "details"}
    overview["detailed"] = [{"row": detail.row, "parts": detail.parts} for detail in report.details]
    contents = {
        "title": escape(f"{report.recipe}: auto3d report"),
        "policy": "; ".join(
            (
                "default-src 'none'",
                f"script-src {' '.join(map(_digest, scripts))}",
                "style-src 'unsafe-inline'",  # plotly.js styles its drawings in place
                "img-src data: blob:",
            )
        ),
        "style": _file("page.css"),
        "data": f'<script type="application/json" id="report">{embedded(overview, folders)}</script>',
        "details": "\n".join(details),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: contents[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("launch.report") / "page" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
