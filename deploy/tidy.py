#!/usr/bin/env python3
"""clang-tidy over many C++ files in little time; deploy/lint.sh calls it.

    python3 deploy/tidy.py [-j JOBS] [-p BUILD_DIR] FILE.cc...

Most of clang-tidy's time for one file goes into the headers that it includes. So files are joined into units that read them
once, with the flags of all their entries in BUILD_DIR/compile_commands.json. A file whose names collide with those of another
one in its unit (both may have them in their anonymous namespaces) goes into a later unit. Lines are reported as those of the
file. Prints each finding once, ends with 1 where there are any.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

UNIT = 16  # Files; with more of them collisions eat the gain.
# Flags of the database that count for what clang-tidy sees; the rest is about code generation and GCC's warnings.
MEANT = re.compile(r"-(D|I|isystem|std=|pthread)")
# avx512fp16: else clang 14 has no _Float16. No -fopenmp: clang-tidy takes any two loops with directives for the same, and
# does not look into them.
FIXED = ["-march=x86-64-v3", "-mavx512fp16", "-w"]
PLACE = re.compile(r"^(\S+?):(\d+):(\d+): (warning|note|error|fatal error): (.*)$")


def flags_of(commands, files):
    """The flags of all the files, each once."""
    flags = {}
    for file in files:
        words = iter(shlex.split(commands[file])[1:])
        for word in words:
            if not MEANT.match(word):
                continue
            flags[(word, next(words)) if word in ("-D", "-I", "-isystem") else (word,)] = None
    return [word for flag in flags for word in flag] + FIXED


class Unit:
    """Files joined into one, and the way back from its lines to theirs."""

    def __init__(self, folder, files):
        self.files = files
        self.starts = []
        text = []
        for number, file in enumerate(files):
            text.append(f"#define main main_{number}")
            self.starts.append(len(text) + 1)
            with open(file, encoding="utf-8") as source:
                text += source.read().splitlines()
            text.append("#undef main")
        handle, self.path = tempfile.mkstemp(suffix=".cc", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write("\n".join(text) + "\n")

    def place(self, path, line):
        """The file and line of a place that the compiler names."""
        if path != self.path:
            return os.path.relpath(path), line
        number = max(i for i, start in enumerate(self.starts) if start <= max(line, self.starts[0]))
        return self.files[number], line - self.starts[number] + 1

    def run(self, command):
        """The command's messages on the unit: (file, line, column, kind, text and the lines below it)."""
        done = subprocess.run(command, capture_output=True, text=True)
        messages = []
        for line in (done.stdout + done.stderr).splitlines():
            found = PLACE.match(line)
            if found:
                messages.append([*self.place(found[1], int(found[2])), *found.groups()[2:]])
            elif messages and not re.match(r"\d+ (warning|error)s? |In file included from|Error while|Suppressed", line):
                messages[-1][-1] += "\n" + line
        if done.returncode != 0 and not messages:
            sys.exit(f"{command[0]} failed: {done.stderr.strip()}")
        return messages


def colliding(unit, flags):
    """The files of a unit that do not compile behind the others."""
    messages = unit.run(["clang++", *flags, "-fsyntax-only", "-ferror-limit=0", unit.path])
    bad = {message[0] for message in messages if "error" in message[3]}
    mine = [file for file in unit.files[1:] if file in bad]
    return mine or (unit.files[len(unit.files) // 2 :] if bad else [])


def check(folder, files, flags):
    """Messages of clang-tidy on those files that fit into one unit, and the files left over."""
    left = []
    while True:
        unit = Unit(folder, files)
        bad = colliding(unit, flags) if len(files) > 1 else []
        if not bad:
            messages = unit.run(["clang-tidy", "--quiet", unit.path, "--", *flags])
            os.unlink(unit.path)
            return messages, left
        os.unlink(unit.path)
        left += bad
        files = [file for file in files if file not in bad]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", type=int, default=1, metavar="JOBS")
    parser.add_argument("-p", default="build", metavar="BUILD_DIR")
    parser.add_argument("files", nargs="+", metavar="FILE.cc")
    args = parser.parse_args()
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    with open(os.path.join(args.p, "compile_commands.json"), encoding="utf-8") as database:
        commands = {os.path.relpath(entry["file"]): entry["command"] for entry in json.load(database)}
    files = [file for file in args.files if file in commands]
    if len(files) < len(args.files):
        print("not in this build, left out:", *(file for file in args.files if file not in commands), file=sys.stderr)
    flags = flags_of(commands, files)

    # Tests apart from the rest, whose headers they do not share.
    pending = sorted(files, key=lambda file: (file.endswith("_test.cc"), file))
    seen, findings = set(), 0
    with tempfile.TemporaryDirectory(dir=args.p, prefix="tidy.") as folder, ThreadPoolExecutor(args.j) as pool:
        folder = os.path.abspath(folder)
        while pending:
            units = [pending[i : i + UNIT] for i in range(0, len(pending), UNIT)]
            pending = []
            for messages, left in pool.map(lambda files: check(folder, files, flags), units):
                pending += left
                shown = False
                for file, line, column, kind, text in messages:
                    key = (file, line, column, text.split("\n")[0])
                    if kind != "note":
                        shown = key not in seen
                        seen.add(key)
                        findings += shown
                    if shown:
                        print(f"{file}:{line}:{column}: {kind}: {text}", flush=True)
            print(f"{len(files) - len(pending)} of {len(files)} files", file=sys.stderr, flush=True)
    print(f"clang-tidy: {findings} findings in {len(files)} files", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
