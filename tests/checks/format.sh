#!/usr/bin/env bash
# Checks that every C++ file of the tree is formatted as .clang-format says; names the command that
# formats those that are not. Usage: format.sh ROOT
set -euo pipefail
cd "$1"

formatter=$(command -v clang-format-14 || command -v clang-format || true)
if [[ -z $formatter ]]; then
  echo "clang-format is not installed: install the package clang-format (scripts/test does it) and run again" >&2
  exit 1
fi

# Tracked files and new ones, but no build output; an unpacked archive has no git and no build output.
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' |
    while IFS= read -r file; do [[ -f $file ]] && echo "$file"; done)
else
  mapfile -t files < <(find . -path ./build -prune -o -path ./.venv -prune -o \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print)
fi
if ((${#files[@]} == 0)); then
  echo "no C++ file found below $PWD: the check would pass on nothing" >&2
  exit 1
fi

wrong=()
for file in "${files[@]}"; do
  "$formatter" --style=file "$file" | cmp --silent - "$file" || wrong+=("$file")
done
echo "${#files[@]} files read with $("$formatter" --version), ${#wrong[@]} not formatted"
if ((${#wrong[@]} > 0)); then
  printf '  %s\n' "${wrong[@]}"
  echo "to format them (the tree is formatted with clang-format 14; other releases may differ):"
  echo "  ${formatter##*/} -i ${wrong[*]}"
  exit 1
fi
