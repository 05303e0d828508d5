#!/usr/bin/env bash
# Writes the table of families in docs/models.md anew, from what the tests see. Needs a build.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib/common.sh"

results="$(mktemp)"
trap 'rm -f "$results"' EXIT
MB_FAMILY_RESULTS="$results" "$MB_BUILD/tests/mb_engine_bridge_test" --gtest_brief=1 --gtest_filter='Families/*' ||
  say "tests failed: their cells say no"
python3 - "$results" "$MB_BUILD/fixtures/hf" "$MB_ROOT/docs/models.md" <<'PYTHON'
import json, os, re, sys

results, fixtures, document = sys.argv[1:]
columns = ["config.json both ways", "import", "export", "there and back", "two shards", "logits", "loss", "gradients"]
seen = {}
for line in open(results, encoding="utf-8"):
    fixture, column, verdict = line.rstrip("\n").split("\t")
    assert column in columns, column
    seen[fixture, column] = "yes" if verdict == "yes" and seen.get((fixture, column)) != "no" else "no"

rows = [["fixture", "model_type"] + columns, ["---"] * (2 + len(columns))]
for fixture in sorted({name for name, _ in seen}):
    with open(os.path.join(fixtures, fixture, "config.json"), encoding="utf-8") as config:
        model_type = json.load(config)["model_type"]
    rows.append([f"`{fixture}`", f"`{model_type}`"] + [seen.get((fixture, column), "no") for column in columns])
table = "\n".join("| " + " | ".join(row) + " |" for row in rows)

with open(document, encoding="utf-8") as file:
    text = file.read()
text, count = re.subn(r"(<!-- families -->\n).*?(\n<!-- end of families -->)", lambda m: m[1] + table + m[2], text, flags=re.S)
assert count == 1, "docs/models.md has lost the marks of its table"
with open(document, "w", encoding="utf-8") as file:
    file.write(text)
print(f"docs/models.md: {len(rows) - 2} fixtures")
PYTHON
