#!/usr/bin/env python3
"""Checks that README.md and the pages beside it are true where a machine can tell.

    readme.py ROOT          readme.py --self-test

1. A code block below the line `<!-- from FILE -->` stands in FILE, line for line.
2. The scenarios of the table below `<!-- rows of FILE -->` are the rows of FILE, in its order.
3. Links to files of the tree lead to files that are there.
4. Commands of scripts/ and .ci/ name a script that is there, with options that stand in its text.
Called by ctest (checks.readme).
"""
import pathlib
import re
import sys
import tempfile

PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/agreement.md", "docs/averaging.md",
         "docs/design.md"]
BLOCK = re.compile(r"^<!-- from (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
TABLE = re.compile(r"^<!-- rows of (\S+) -->\n(?:\|[^\n]*\n){2}((?:\|[^\n]*\n)+)", re.M)
ROW = re.compile(r'^\s*\{"([^"]+)", ', re.M)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")

COMMAND = re.compile(r"(?<![\w/.])((?:scripts|\.ci)/[\w-]+)(?![\w/.])((?:[ \t]+[^\s`#]+)*)")


def without_indentation(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


def errors_of(root, pages, needed):
    """Every fault found, a line each. `needed`: marks without which README.md would be checked for nothing."""
    errors = []
    found = set()
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        for name, block in BLOCK.findall(text):
            found.add("from")
            # Indentation is left out, so that the heart of a function can stand alone.
            source = "\n" + without_indentation((root / name).read_text(encoding="utf-8")) + "\n"
            if "\n" + without_indentation(block) + "\n" not in source:
                errors.append(f"{page}: the code block is not, line for line, in {name}")
        for name, rows in TABLE.findall(text):
            found.add("rows of")
            said = [row.split("|")[1].strip() for row in rows.splitlines()]
            true = ROW.findall((root / name).read_text(encoding="utf-8"))
            if said != true:
                errors.append(f"{page}: the table's scenarios are {said}, those of {name} {true}")
        for link in LINK.findall(text):
            if not ((root / page).parent / link).exists():
                errors.append(f"{page}: the link {link} leads nowhere")
        for script, arguments in COMMAND.findall(text):
            if not (root / script).is_file():
                errors.append(f"{page}: there is no {script}")
                continue
            known = (root / script).read_text(encoding="utf-8")
            for option in re.findall(r"--[\w-]+", arguments):
                if not re.search(rf"{option}(?![\w-])", known):
                    errors.append(f"{page}: {script} knows no {option}")
    for mark in sorted(needed - found):
        errors.append(f"no '<!-- {mark} FILE -->' was found: there is nothing to check")
    return errors


def self_test():
    """The check must fail where it should: one true page, and each of its ways to be wrong."""
    page = "<!-- from a.cpp -->\n```cpp\nint x;\n  int y;\n```\n\n<!-- rows of b.cpp -->\n| s | t |\n|---|---|\n| one | ok |\n| two | ok |\n\n[b](b.cpp)\n\n`scripts/run --fast -R x` runs.\n"
    wrong = {
        "code": page.replace("int x;", "int z;"),
        "order": page.replace("int x;\n  int y;", "int y;\nint x;"),
        "part of a line": page.replace("int x;\n  int y;", "x;\nint y;"),
        "row left out": page.replace("| two | ok |\n", ""),
        "row renamed": page.replace("| two |", "| three |"),
        "link": page.replace("(b.cpp)", "(c.cpp)"),
        "script": page.replace("scripts/run", "scripts/walk"),
        "option": page.replace("--fast", "--faster"),
        "no code": page.replace("from a.cpp", "of a.cpp"),
        "no table": page.replace("rows of b.cpp", "rows b.cpp"),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "a.cpp").write_text("// a\n  int x;\n    int y;\n")
        (root / "b.cpp").write_text('  {"one", run},\n  {"two", run},\n')
        (root / "scripts").mkdir()
        (root / "scripts/run").write_text("#   --fast   at once\n")
        missed = []
        for name, text in {"": page, **wrong}.items():
            (root / "README.md").write_text(text)
            if bool(errors_of(root, ["README.md"], {"from", "rows of"})) != bool(name):
                missed.append(name or "the true page is refused")
    return [f"self-test: not noticed: {name}" for name in missed]


def main():
    if sys.argv[1:] == ["--self-test"]:
        errors = self_test()
    else:
        errors = errors_of(pathlib.Path(sys.argv[1]), PAGES, {"from", "rows of"})
    for error in errors:
        print(error)
    print(f"{len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
