"""What a server's own address tells about its work. A case is an http() call of a server for `PATH`."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from harness.checks.base import Check, Evidence, Finding, concluded, untestable
from harness.contract.faults import Fact
from harness.records.recording import Call

PATH = "/metrics"
SERIES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")
"""Three of the series that a server documents. The last one counts what its engine made."""


def _value(text: str, series: str) -> float | None:
    """The sum of a series over its labels (Prometheus documentation, Exposition formats); None if the text lacks it."""
    found = re.findall(rf"^{re.escape(series)}(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, found)) if found else None


def _judge(evidence: Evidence) -> Finding:
    asked = [c for c in evidence.calls("http") if c.request["path"] == PATH and c.request.get("server")]
    made = sum(len(execution.tokens) for execution in evidence.executions)
    if not asked or not made:
        return untestable("no server was asked for its metrics after it had made a token")
    wrong: list[tuple[str, dict[str, Any]]] = []
    counted = 0.0
    for call in asked:
        result = call.result or {}
        values = {series: _value(str(result.get("body")), series) for series in SERIES}
        counted += values[SERIES[-1]] or 0.0
        if result.get("status") != HTTPStatus.OK:
            wrong.append((f"a server has no {PATH}", _shown(call)))
        elif lacking := [series for series, value in values.items() if value is None]:
            wrong.append((f"the metrics of a server lack {', '.join(lacking)}", _shown(call)))
    if not wrong and counted < made:
        wrong.append(("the metrics count fewer tokens than the engines made", {"counted": counted, "made": made}))
    return concluded(len(asked) * len(SERIES), wrong, counted=int(counted), made=made)


def _shown(call: Call) -> dict[str, Any]:
    result = call.result or {}
    return {"call": call.id, "server": call.request["server"], "status": result.get("status")}


HTTP_METRICS = Check(
    name="http_metrics",
    fault="a monitor of the servers sees nothing any more: their metrics are gone, or count nothing",
    next_step="ask the server itself for the address; then look at which logger of statistics its engine is started with",
    reads=Fact.ANSWERS,
    source="vLLM documentation, Production Metrics: the /metrics endpoint of the OpenAI-compatible server",
    judge=_judge,
)
