#!/usr/bin/env bash
# Runs PROGRAM on ranks that take each other for ranks of other hosts: each in a PID namespace of
# its own, and MPI over TCP. Exits with 77, which ctest calls skipped, where namespaces are not
# allowed. Usage: hosts.sh RANKS MPIRUN... -- PROGRAM ARGUMENT...
set -euo pipefail
ranks=$1
shift
launcher=()
while [[ $1 != -- ]]; do
  launcher+=("$1")
  shift
done
shift

host=(unshare --pid --fork --mount-proc --kill-child)
if ! "${host[@]}" true 2>/dev/null; then
  host=(unshare --user --map-root-user --pid --fork --mount-proc --kill-child)
  if ! "${host[@]}" true 2>/dev/null; then
    echo "not run: this machine allows no PID namespaces" >&2
    exit 77
  fi
fi
exec "${launcher[@]}" --mca btl tcp,self -np "$ranks" "${host[@]}" "$@"
