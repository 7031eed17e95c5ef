"""Check the dashboards in deploy/grafana against Grafana's schema, with the TypeScript compiler.

npm install --prefix build/grafana @grafana/schema@11.6.0 typescript@7.0.2
python tools/check_dashboards.py build/grafana
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "deploy" / "grafana"
PANELS = {"timeseries": "TimeSeries", "stat": "Stat", "heatmap": "Heatmap"}  # panel type: name of its schema
OWN_FIELDS = ("timeseries", "heatmap")
# TypeScript types have the names of enumeration members; JSON has their values.
PLAIN = """\
type Plain<T> = T extends string ? `${T}` : T extends (infer I)[] ? Plain<I>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def source_of(dashboard: dict[str, Any], schema: Path) -> str:
    raw = schema / "dist" / "esm" / "raw"
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    lines = [f"import type {{ Dashboard }} from '{raw}/dashboard/x/dashboard_types.gen';"]
    lines += [
        f"import type * as {name} from '{raw}/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen';"
        for kind, name in PANELS.items()
    ]
    lines += [PLAIN, f"export const board: Plain<Dashboard> = {json.dumps(dashboard)};"]
    for number, panel in enumerate(panels):
        name = PANELS[panel["type"]]
        options = json.dumps(panel.get("options", {}))
        lines.append(f"export const options{number}: Plain<Partial<{name}.Options>> = {options};")
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
        if panel["type"] in OWN_FIELDS and custom is not None:
            fields = json.dumps(custom)
            lines.append(f"export const fields{number}: Plain<{name}.FieldConfig> = {fields};")
    return "\n".join(lines) + "\n"


def check(packages: Path, folder: Path = FOLDER) -> list[str]:
    """Return the compiler's messages for the dashboards in ``folder``; none if all are correct."""
    modules = packages.resolve() / "node_modules"
    with tempfile.TemporaryDirectory() as work:
        files = []
        for path in sorted(folder.glob("*.json")):
            file = Path(work) / f"{path.stem}.ts"
            file.write_text(source_of(json.loads(path.read_text()), modules / "@grafana" / "schema"))
            files.append(str(file))
        done = subprocess.run(
            ["node", str(modules / "typescript" / "lib" / "tsc.js"), "--noEmit", "--strict", "--skipLibCheck",
             "--module", "esnext", "--moduleResolution", "bundler", "--ignoreConfig", *files],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    problems = (done.stdout + done.stderr).splitlines()
    if done.returncode and not problems:
        problems.append(f"the compiler ended with {done.returncode}")
    return problems


def main(packages: str) -> int:
    problems = check(Path(packages))
    print(
        "\n".join(problems) or f"{len(list(FOLDER.glob('*.json')))} dashboards are what Grafana's schema says"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
