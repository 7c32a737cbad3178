#!/usr/bin/env python3
"""Checks that scripts/trace-picture draws what a fresh trace holds.

    trace_picture.py SCRIPT COMMAND...     COMMAND records a trace of two ranks into the file added to it

Called by ctest (checks.trace_picture).
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def main():
    script, command = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        subprocess.run([*command, str(trace)], check=True)
        picture = pathlib.Path(folder) / "picture.svg"
        subprocess.run([sys.executable, script, str(trace), "-o", str(picture)], check=True)
        merged = pathlib.Path(folder) / "all.json"
        subprocess.run([sys.executable, script, str(trace), "--merge", str(merged)], check=True)
        root = xml.etree.ElementTree.parse(picture).getroot()
        events = json.loads(merged.read_text())["traceEvents"]
        ranks = len(list(pathlib.Path(folder).glob("trace.rank*.json"))) or 1
        nowhere = subprocess.run([sys.executable, script, str(trace.with_name("no.json")), "-o", str(picture)],
                                 capture_output=True, text=True)

    texts = [text.text for text in root.iter(SVG + "text")]
    titles = [title.text for title in root.iter(SVG + "title")]
    errors = []
    for rank in range(ranks):
        if f"rank {rank}" not in texts:
            errors.append(f"no rows of rank {rank}")
    for row in ("user thread", "images", "texts", "queue"):
        if texts.count(row) < ranks:
            errors.append(f"{texts.count(row)} rows '{row}' for {ranks} ranks")
    folds = sum(title.startswith("fold ") for title in titles)
    recorded = sum(event["name"] == "fold" for event in events)
    if not 0 < folds == recorded:
        errors.append(f"{folds} folds drawn, {recorded} recorded")
    if len({event["pid"] for event in events}) != ranks:
        errors.append("the merged file lacks a rank")
    ids = [event["id"] for event in events if event.get("ph") == "s"]
    if len(ids) != len(set(ids)):
        errors.append("two arrows of the merged file have one number")
    if nowhere.returncode == 0 or "no.json" not in nowhere.stderr:
        errors.append("a missing trace is no error that names it")
    print("\n".join(errors) or f"{ranks} ranks, {folds} folds drawn")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
