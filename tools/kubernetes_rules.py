"""Write the Prometheus rules as a Kubernetes object: ``python tools/kubernetes_rules.py``.

The rules are in ``deploy/prometheus``.
"""

from __future__ import annotations

import textwrap

from live_prometheus import DEPLOY, RULES

TARGET = DEPLOY / "kubernetes" / "rules.yaml"
HEAD = """\
# Written by tools/kubernetes_rules.py from ../prometheus. Needs the Prometheus Operator, whose Prometheus
# must select these rules (often by a label `release`).
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: octavo
  namespace: octavo
  labels: {app.kubernetes.io/name: octavo}
spec:
  groups:
"""


def prometheus_rule() -> str:
    groups = (path.read_text().split("groups:\n", 1)[1] for path in RULES)
    return HEAD + "".join(textwrap.indent(group, "  ") for group in groups)


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule())
    print(f"wrote {TARGET.relative_to(DEPLOY.parent)}")
