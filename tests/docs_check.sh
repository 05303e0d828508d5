#!/usr/bin/env bash
# Documents: every relative link and every script that a command line names exists; no path of somebody's machine.
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib/common.sh"
cd "$MB_ROOT"
git ls-files -z -- '*.md' | xargs -0 python3 -c '
import os, re, sys

faults = []
for path in sys.argv[1:]:
    text = open(path, encoding="utf-8").read()
    folder = os.path.dirname(path)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        if not os.path.exists(os.path.join(folder, target)):
            faults.append(f"{path}: link to {target}, which does not exist")
    for script in re.findall(r"\bbash ((?:deploy|tests|\.ci)/[\w./-]+)", text):
        if not os.path.exists(script):
            faults.append(f"{path}: command bash {script}, which does not exist")
    for place in re.findall(r"(?<![\w.])/(?:work|root)/[\w/.-]+", text):
        faults.append(f"{path}: {place} is a path of one machine")
print("\n".join(faults) if faults else f"documents: {len(sys.argv) - 1} checked, links and scripts exist")
sys.exit(1 if faults else 0)
'
