"""Write the Grafana dashboards into deploy/grafana: ``python tools/dashboards.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboard_panels import DASHBOARDS, Kind, Page, Panel

FOLDER = Path(__file__).parent.parent / "deploy" / "grafana"
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES = [
    {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
    {
        "name": "instance", "label": "Server", "type": "query", "datasource": SOURCE,
        "query": "label_values(octavo_build_info, instance)", "refresh": 2, "multi": True, "includeAll": True,
        "allValue": ".*", "current": {"selected": True, "text": "All", "value": "$__all"},
    },
]  # fmt: skip
LINES = {"lineWidth": 1, "showPoints": "never"}
STYLES: Mapping[Kind, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    Kind.STAT: ("stat", {"graphMode": "area"}, {}),
    Kind.HEATMAP: ("heatmap", {"calculate": False}, {}),
    Kind.LINES: ("timeseries", {}, LINES),
    Kind.STACK: ("timeseries", {}, LINES | {"fillOpacity": 30, "stacking": {"mode": "normal"}}),
}
"""Type of a panel, its options, and those of its fields."""


def build(page: Page) -> str:
    board = {
        "uid": page.uid, "title": page.title, "description": page.description, "tags": ["octavo"],
        "editable": True, "graphTooltip": 1, "refresh": "30s", "schemaVersion": 41, "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": VARIABLES},
        "panels": list(_placed(page.panels)),
    }  # fmt: skip
    return json.dumps(board, sort_keys=True, indent=2) + "\n"


def _placed(panels: tuple[Panel, ...]) -> Iterator[dict[str, Any]]:
    x = y = height = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            x, y = 0, y + height
        height = 4 if panel.kind is Kind.STAT else 8
        yield _panel(panel) | {"gridPos": {"h": height, "w": panel.width, "x": x, "y": y}}
        x += panel.width


def _panel(panel: Panel) -> dict[str, Any]:
    kind, options, custom = STYLES[panel.kind]
    more = {"format": "heatmap"} if panel.kind is Kind.HEATMAP else {}
    return {
        "type": kind, "title": panel.title, "description": panel.description, "datasource": SOURCE,
        "options": options,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True, "refId": ref, **more}
            for ref, (legend, expr) in zip("ABCDEFGH", panel.series.items(), strict=False)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    for page in DASHBOARDS:
        (FOLDER / f"{page.uid}.json").write_text(build(page), encoding="utf-8")
        print(f"wrote deploy/grafana/{page.uid}.json: {len(page.panels)} panels")
