"""Every published schema. `python -m reports.schemas` renews the files."""

from __future__ import annotations

import json

from reports import bench, json_report, kill_matrix, matrix, mutants

ALL = (json_report.SCHEMA, kill_matrix.SCHEMA, mutants.SCHEMA, matrix.SCHEMA, bench.SCHEMA)

if __name__ == "__main__":
    for schema in ALL:
        schema.path.write_text(json.dumps(schema.made(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
