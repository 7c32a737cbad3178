#!/usr/bin/env bash
# Starts ranks as torchrun does on one host: a process each, with MASTER_ADDR, MASTER_PORT, RANK,
# WORLD_SIZE and LOCAL_RANK. When one fails the others are ended. Exits with the first status that is
# not zero.
# Usage: torchrun_like.sh [--ranks "0 2"] [--agent "SERVER ARGUMENT..."] [--times N] SIZE PROGRAM ARGUMENT...
#   --ranks   only these come
#   --agent   the store is kept by SERVER, which is called with a port and ends with its input; and
#             the ranks are told so, as those of torchrun's agent
#   --times   the ranks are started so many times, one set after another, at the same address
set -uo pipefail
only='' agent='' times=1
while [[ $1 == --* ]]; do
  case $1 in
    --ranks) only=$2 ;;
    --agent) agent=$2 ;;
    --times) times=$2 ;;
    *) echo "torchrun_like.sh: what is $1?" >&2; exit 2 ;;
  esac
  shift 2
done
size=$1
shift

# A port that was free a moment ago.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') || exit 2
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=$size
if [[ -n $agent ]]; then
  coproc server { exec $agent "$port"; }
  read -r _ <&"${server[0]}" || exit 2  # it says when it is ready
  export TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=none
fi

status=0
for ((attempt = 0; attempt < times && status == 0; ++attempt)); do
  ranks=()
  for ((rank = 0; rank < size; ++rank)); do
    [[ -z $only || " $only " == *" $rank "* ]] || continue
    RANK=$rank LOCAL_RANK=$rank TORCHELASTIC_RESTART_COUNT=$attempt "$@" &
    ranks+=($!)
  done
  for ((left = ${#ranks[@]}; left > 0; --left)); do
    wait -n  # an agent ends later
    code=$?
    if [[ $code -ne 0 && $status -eq 0 ]]; then
      status=$code
      kill "${ranks[@]}" 2>/dev/null
    fi
  done
done
[[ -z $agent ]] || { exec {server[1]}>&-; wait "$server_PID"; } 2>/dev/null
exit "$status"
