"""Write the Grafana dashboards into deploy/grafana: ``python tools/dashboards.py``.

Needs the extra ``dashboards``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboard_panels import DASHBOARDS, Kind, Page, Panel

FOLDER = Path(__file__).parent.parent / "deploy" / "grafana"
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
AnyPanel: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel


def build(page: Page) -> str:
    board = (
        builders.Dashboard(page.title)
        .uid(page.uid)
        .tags(["octavo"])
        .description(page.description)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_instances())
    )
    for panel in page.panels:
        board = board.with_panel(_panel(panel))
    built = json.loads(JSONEncoder().encode(board.build()))
    for variable in built["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)
    return json.dumps(built, sort_keys=True, indent=2) + "\n"


def _instances() -> builders.QueryVariable:
    every = dashboard.VariableOption(text="All", value="$__all", selected=True)
    return (
        builders.QueryVariable("instance")
        .label("Server")
        .datasource(SOURCE)
        .query("label_values(octavo_build_info, instance)")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(every)
    )


def _panel(panel: Panel) -> AnyPanel:
    built = _bare(panel).title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit)
    built = built.span(panel.width).height(4 if panel.kind is Kind.STAT else 8).min(0)
    for number, (legend, expression) in enumerate(panel.series.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        if panel.kind is Kind.HEATMAP:
            query = query.format(PromQueryFormat.HEATMAP)
        built = built.with_target(query.datasource(SOURCE).range())
    return built


def _bare(panel: Panel) -> AnyPanel:
    if panel.kind is Kind.STAT:
        return stat.Panel().graph_mode(common.BigValueGraphMode.AREA)
    if panel.kind is Kind.HEATMAP:
        return heatmap.Panel().calculate(False)
    lines = timeseries.Panel().line_width(1).show_points(common.VisibilityMode.NEVER)
    if panel.kind is Kind.STACK:
        lines = lines.fill_opacity(30).stacking(
            common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        )
    return lines


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in DASHBOARDS:
        (FOLDER / f"{page.uid}.json").write_text(build(page), encoding="utf-8")
        print(f"wrote deploy/grafana/{page.uid}.json: {len(page.panels)} panels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
