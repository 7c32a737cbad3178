#!/usr/bin/env python3
"""Checks that includes follow the arrows between the rooms:

    kernels <- comm <- zero <- engine -> hooks        include/tandem: value types for all above kernels

1. A room includes only itself, the rooms its arrows lead to, and (above kernels) value types.
2. LibTorch: none in kernels/ and comm/; in zero/ only ATen and c10 in .cpp files; never torch/torch.h
   in a header.
3. mpi.h: only in comm/, tests/ and benchmarks/.
4. include/tandem includes nothing of the rooms; cli/ and examples/ use include/tandem only.
5. Nothing includes tests/ or benchmarks/, except those two themselves.
6. A quoted include names a file from the tree's root, and that file is there.

Usage: arrows.py ROOT checks a tree; arrows.py --self-test checks that each rule is able to fail.
"""

import pathlib
import re
import sys
import tempfile

SUFFIXES = {".h", ".hpp", ".cpp", ".cu", ".cuh"}
ROOMS = ("kernels", "comm", "zero", "hooks", "engine")
ANYTHING = ROOMS + ("cli", "examples", "tests", "benchmarks")

# Folder -> folders it may include. None stands for "all".
ARROWS = {
    "kernels": {"kernels"},
    "comm": {"comm", "kernels"},
    "zero": {"zero", "comm", "kernels"},
    "hooks": {"hooks"},
    "engine": {"engine", "zero", "hooks", "comm", "kernels"},
    "include": set(),
    "cli": {"cli"},
    "examples": {"examples"},
    "tests": set(ANYTHING),
    "benchmarks": set(ANYTHING),
}

# Parts of kernels/ that rooms other than zero/ may see: what orders and describes work, not what does it.
KERNELS_SEEN_BY = {
    "comm": {"queue.h", "stream.h", "device.h", "cuda_device.h", "nvtx.h", "check.h", "fold.h", "dtype.h"},
    "engine": {"queue.h", "stream.h", "device.h", "cuda_device.h", "nvtx.h", "check.h", "fold.h", "dtype.h", "norm.h",
               "powers.h", "superaccumulator.h"},
}

# Public headers that are values, without LibTorch. The classes are the engine room's to implement.
VALUE_TYPES = {"error.h", "optimizer.h", "options.h", "report.h"}
PUBLIC_SEEN_BY = {
    "kernels": set(),
    "comm": VALUE_TYPES,
    "zero": VALUE_TYPES,
    "hooks": VALUE_TYPES,
}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
TORCH = re.compile(r"^(torch|ATen|c10)/")


def objection(root, folder, path, quoted, system):
    """What is wrong with one include of `path` (a file of `folder`), or None."""
    name = quoted or system
    top = name.split("/")[0]
    is_header = path.suffix in {".h", ".hpp", ".cuh"}
    if quoted and not (root / quoted).is_file():
        return "no such file below the root (name it from there; public headers as <tandem/...>)"
    if top in ANYTHING and (quoted or (root / name).is_file()):
        if top not in ARROWS[folder]:
            return f"{folder}/ must not include {top}/"
        seen = KERNELS_SEEN_BY.get(folder)
        if top == "kernels" and seen is not None and name.split("/", 1)[1] not in seen:
            return f"of kernels/, {folder}/ may include only {', '.join(sorted(seen))}"
    if top == "tandem" and folder in PUBLIC_SEEN_BY:
        if name.split("/", 1)[1] not in PUBLIC_SEEN_BY[folder]:
            return f"{folder}/ must not include this public header"
    if TORCH.match(name):
        if folder in ("kernels", "comm"):
            return f"{folder}/ must not include LibTorch"
        if folder == "zero" and (is_header or top == "torch"):
            return "zero/ includes only ATen and c10, and only in .cpp files"
        if name == "torch/torch.h" and is_header and folder not in ("tests", "benchmarks"):
            return "torch/torch.h in a header: include the parts that are used"
    if name == "mpi.h" and folder not in ("comm", "tests", "benchmarks"):
        return "mpi.h belongs in comm/"
    return None


def check(root):
    """All objections, as 'file:line: #include name: why'; and how many files were read."""
    found, files = [], 0
    for folder in ARROWS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            files += 1
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                why = match and objection(root, folder, path, *match.groups())
                if why:
                    found.append(f"{path.relative_to(root)}:{number}: {line.strip()}: {why}")
    return found, files


# File, include line, and whether it is allowed.
SELF_TESTS = [
    ("kernels/a.cpp", '#include "kernels/fold.h"', True),
    ("kernels/a.cpp", '#include "comm/group.h"', False),
    ("kernels/a.cpp", "#include <comm/group.h>", False),
    ("kernels/a.cpp", "#include <tandem/error.h>", False),
    ("kernels/a.cpp", "#include <c10/util/BFloat16.h>", False),
    ("comm/a.cpp", '#include "kernels/fold.h"', True),
    ("comm/a.cpp", '#include "kernels/update.h"', False),
    ("comm/a.cpp", '#include "zero/partition.h"', False),
    ("comm/a.cpp", "#include <ATen/core/Tensor.h>", False),
    ("comm/a.cpp", "#include <tandem/error.h>", True),
    ("comm/a.cpp", "#include <tandem/world.h>", False),
    ("comm/a.cpp", "#include <mpi.h>", True),
    ("zero/a.cpp", "#include <ATen/core/Tensor.h>", True),
    ("zero/a.h", "#include <ATen/core/Tensor.h>", False),
    ("zero/a.cpp", "#include <torch/torch.h>", False),
    ("zero/a.cpp", "#  include <mpi.h>", False),
    ("zero/a.cpp", '#include "engine/step.h"', False),
    ("hooks/a.cpp", "#include <torch/csrc/autograd/engine.h>", True),
    ("hooks/a.cpp", '#include "kernels/fold.h"', False),
    ("hooks/a.cpp", '#include "zero/partition.h"', False),
    ("engine/a.cpp", '#include "hooks/hooks.h"', True),
    ("engine/a.cpp", '#include "kernels/update.h"', False),
    ("engine/a.h", "#include <torch/torch.h>", False),
    ("engine/a.cpp", '#include "tests/support/oracle.h"', False),
    ("engine/a.cpp", '#include "step.h"', False),
    ("include/tandem/a.h", "#include <tandem/error.h>", True),
    ("include/tandem/a.h", '#include "engine/step.h"', False),
    ("examples/a.cpp", "#include <tandem/world.h>", True),
    ("examples/a.cpp", '#include "engine/step.h"', False),
    ("tests/a.cpp", '#include "engine/step.h"', True),
]


def self_test():
    wrong = 0
    for name, line, allowed in SELF_TESTS:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for header in ("kernels/fold.h", "kernels/update.h", "comm/group.h", "zero/partition.h",
                           "hooks/hooks.h", "engine/step.h", "tests/support/oracle.h"):
                (root / header).parent.mkdir(parents=True, exist_ok=True)
                (root / header).write_text("#pragma once\n")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"// first line\n{line}\n")
            found, _ = check(root)
            as_expected = not found if allowed else len(found) == 1 and found[0].startswith(f"{name}:2: ")
            if not as_expected:
                wrong += 1
                print(f"{name}: {line}: expected {'no objection' if allowed else 'one'}, got {found}")
    print(f"{len(SELF_TESTS)} includes tried, {wrong} judged wrongly")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    found, files = check(pathlib.Path(sys.argv[1]))
    for line in found:
        print(line)
    print(f"{files} files read, {len(found)} includes against the arrows")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
