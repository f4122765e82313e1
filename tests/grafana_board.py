"""The queries of the Grafana dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "tercet.json"


def read_board() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panel_queries(board: Any) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def variable_queries(board: Any) -> list[str]:
    return [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
