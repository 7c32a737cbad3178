#!/usr/bin/env python3
"""Writes docs/performance.md from what the benchmarks measured (JSON of Google Benchmark, counters of
benchmarks/paired.h). Called by scripts/bench; standard library only.

    report.py --merge build/bench/step.new build/bench/step.json
    report.py --results build/bench --build build/release --load 0.1 --page docs/performance.md
"""

import argparse
import json
import pathlib
import platform
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load(folder, name):
    """The benchmarks of one file by name, and its context; nothing if it was never measured."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return {}, {}
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = {}
    for row in data["benchmarks"]:
        if "figure_ms" in row:
            rows[row["name"].split("/iterations:")[0]] = row
    return rows, data["context"]


def merge(new, file):
    """Moves the results `new` into `file`, which keeps its rows that were not measured again."""
    data = json.loads(new.read_text(encoding="utf-8"))
    if file.is_file():
        measured = {row["name"] for row in data["benchmarks"]}
        old = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        data["benchmarks"] = [row for row in old if row["name"] not in measured] + data["benchmarks"]
    file.write_text(json.dumps(data, indent=1), encoding="utf-8")
    new.unlink()


def time_of(ms):
    """Milliseconds in a unit that keeps three digits readable."""
    if ms == 0:
        return ""
    if ms < 0.1:
        return f"{ms * 1e3:.3g} µs"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"


def verdict(row):
    if not row.get("floor"):
        return "", ""
    return f"{row['floor']:.2f}", "yes" if row["ratio"] >= row["floor"] else "**no**"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def paired_table(benchmarks, prefix, extras=()):
    """Name, figure, limit, ratio, floor, met, spread, and further counters with their format."""
    rows = []
    for name, row in benchmarks.items():
        if not re.match(prefix, name):
            continue
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        rows.append([name.split("/", 1)[1], time_of(row["figure_ms"]), time_of(row["limit_ms"]), ratio,
                     *verdict(row), f"{100 * row['spread']:.0f} %",
                     *(form.format(row[key]) if key in row else "" for key, _, form in extras)])
    if not rows:
        return "Not measured yet.\n"
    header = ["", "figure", "limit", "ratio", "floor", "met", "spread", *(title for _, title, _ in extras)]
    return table(header, rows)


def kernels(folder):
    alone, _ = load(folder, "kernels")
    copies, _ = load(folder, "kernels_two_copies")
    extras = [("ns_per_element", "ns/element", "{:.2f}"), ("bytes_per_element", "bytes/element", "{:.0f}"),
              ("GB_per_s", "GB/s", "{:.1f}")]
    text = ("## Updates, norm, fold\n\nOne thread, 20 M elements. The limit reads and writes the same arrays "
            "with one addition an element\n(benchmarks/streams.cpp, compiled for this machine).\n\n")
    text += paired_table(alone, "update|norm|fold", extras)
    text += "\nTwo copies of the program at the same time, as two ranks have it:\n\n"
    return text + paired_table(copies, "update|norm|fold", extras)


def ranks(folder):
    text = ("## Reduction, gather, agreement\n\nProcesses on one node, no LibTorch; the slowest rank's time "
            "from a barrier. Limit of a reduction: the\nsame fold of private memory by all ranks at once; of a "
            "gather: memcpy of the same bytes. Busy: a computing\nthread in each rank; no floor, because the "
            "two share a core.\n")
    for count in (2, 3):
        benchmarks, context = load(folder, f"ranks_{count}")
        text += f"\n{count} ranks"
        if context and count > context["num_cpus"]:
            text += f" on {context['num_cpus']} cores (ranks take turns: not what a machine with a core a rank does)"
        text += ":\n\n" + paired_table(benchmarks, "reduction|gather|agreement", [("GB_per_s", "GB/s a rank", "{:.1f}")])
    return text


def hooks(folder):
    benchmarks, _ = load(folder, "hooks")
    text = ("## Hooks\n\nModels of scalars on one rank: nothing but fixed costs. What an engine adds to the plain "
            "backward pass of the\nsame graph, and a whole step, per parameter.\n\n")
    if not benchmarks:
        return text + "Not measured yet.\n"
    rows = []
    for name, row in benchmarks.items():
        rows.append([f"{row['parameters']:.0f}", f"{row['buckets']:.0f}", time_of(row["figure_ms"]),
                     time_of(row["limit_ms"]), f"{row['extra_ns']:.0f}", f"{row['step_ns']:.0f}"])
    text += table(["parameters", "buckets", "with the engine", "plain backward", "extra ns/parameter",
                   "step ns/parameter"], rows)
    for what, chosen in (("one bucket", [r for r in benchmarks.values() if r["buckets"] < r["parameters"]]),
                         ("a bucket each", [r for r in benchmarks.values() if r["buckets"] == r["parameters"]])):
        costs = [r["extra_ns"] for r in chosen if r["parameters"] >= 1000]
        if len(costs) > 1 and min(costs) > 0:
            text += (f"\nWith {what}, from 1,000 parameters on, the largest extra cost a parameter is "
                     f"{max(costs) / min(costs):.1f} times the smallest.\n")
    return text


def steps(folder):
    benchmarks, _ = load(folder, "step")
    text = ("## Whole steps\n\n2 ranks of one thread, each on its own core; AdamW; two towers with batch 32 a rank "
            "(benchmarks/workloads.h),\nand the model of examples/code_search with 256 pairs a rank. Limit: the same "
            "program without communication\nand sharding, which updates every whole parameter in each rank. At "
            "most a tenth above it: ratio 0.91.\n\n")
    extras = [(f"{key}_ms", title, "{:.1f}") for key, title in
              (("pass", "forward + backward"), ("plain_pass", "of the limit"), ("exposed", "exposed reduction"),
               ("norm", "norm"), ("update", "update"), ("gather", "gather"))]
    text += paired_table(benchmarks, "step", extras)
    text += "\nThe columns after spread are rank 0's, in ms.\n"
    path = folder / "ddp.json"
    if not path.is_file():
        return text
    peers = json.loads(path.read_text(encoding="utf-8"))
    text += (f"\nPyTorch {peers['torch']}, DistributedDataParallel over Gloo with fused AdamW "
             "(benchmarks/peers/ddp.py), the same\ntowers in fp32, measured in the same run:\n\n")
    rows = []
    for name, peer in peers["steps"].items():
        ours = [benchmarks.get(f"step/{name}, fp32{suffix}") for suffix in ("", ", one copy a node")]
        rows.append([name, f"{peer['step_ms']:.0f} ms", f"{100 * peer['spread']:.0f} %",
                     *(f"{row['figure_ms']:.0f} ms" if row else "" for row in ours),
                     *(f"{peer['step_ms'] / row['figure_ms']:.2f}" if row else "" for row in ours)])
    return text + table(["", "DDP", "spread", "Tandem", "one copy a node", "DDP / Tandem", "DDP / one copy"], rows)


def output_of(*command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def cached(build, key):
    path = build / "CMakeCache.txt"
    if not path.is_file():
        return ""
    found = re.search(rf"^{key}:[A-Z]+=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else ""


def machine(folder, build, load_before):
    contexts = [load(folder, name)[1] for name in ("kernels", "ranks_2", "ranks_3", "hooks", "step")]
    dates = sorted(context["date"] for context in contexts if context)
    cpu = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = int(re.search(r"^MemTotal:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE).group(1))
    cores = next((context["num_cpus"] for context in contexts if context), 0)
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    if commit and output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/performance.md"):
        commit += " with changes"
    compiler = output_of(cached(build, "CMAKE_CXX_COMPILER") or "c++", "--version").splitlines()
    flags = cached(build, "CMAKE_CXX_FLAGS_RELWITHDEBINFO")
    rows = [["machine", f"{cpu.group(1) if cpu else platform.machine()}, {cores} cores, "
                        f"{memory / 2**20:.0f} GiB, Linux {platform.release()}"],
            ["date", dates[0][:16].replace("T", " ") if dates else ""],
            ["commit", commit or "no git here"],
            ["compiler", f"{compiler[0] if compiler else ''}, {flags}"],
            ["LibTorch", next((c["libtorch"] for c in contexts if "libtorch" in c), "")],
            ["load before", f"{load_before:.2f}" + (" **high: read nothing from this page**" if load_before > cores / 2 else "")]]
    return table(["", ""], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--merge", type=pathlib.Path, nargs=2, metavar=("NEW", "FILE"))
    parser.add_argument("--results", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--load", type=float, default=0.0, help="load of the machine before the run")
    parser.add_argument("--page", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.merge:
        merge(*arguments.merge)
        return
    if not (arguments.results and arguments.build and arguments.page):
        parser.error("--results, --build and --page are needed to write the page")
    missed, measured = [], 0
    for file in ("kernels", "kernels_two_copies", "ranks_2", "ranks_3", "step"):
        for name, row in load(arguments.results, file)[0].items():
            measured += bool(row.get("floor"))
            if row.get("floor") and row["ratio"] < row["floor"]:
                copies = ", two copies" if file == "kernels_two_copies" else ""
                missed.append(f"- {name}{copies}: {row['ratio']:.3f} of {row['floor']:.3f}\n")
    text = ("# Performance\n\n<!-- written by benchmarks/report.py: change that, not this page -->\n\n"
            "`scripts/bench` measures this page again, `scripts/bench --peers` with PyTorch beside it, `--only REGEX` a "
            "part of it\n(`--help` says more). Every figure stands beside the machine's limit for it, measured in "
            "turn with it in the\nsame run: memory speed drifts by a fifth within minutes, ratios do not. Ratio: limit "
            "/ figure, 1 is as fast as\nthe limit, median over the pairs. Floor: the smallest ratio that is good "
            "enough. Spread: interquartile range\nof the figure over its median.\n\n")
    if "quick" in load(arguments.results, "kernels")[1]:
        text += "**A quick run on little data: the figures mean nothing.**\n\n"
    text += machine(arguments.results, arguments.build, arguments.load) + "\n"
    if missed:
        text += "Floors missed:\n\n" + "".join(missed) + "\n"
    elif measured:
        text += f"All {measured} floors are met.\n\n"
    text += "\n".join(part(arguments.results) for part in (kernels, ranks, hooks, steps))
    arguments.page.parent.mkdir(parents=True, exist_ok=True)
    arguments.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
