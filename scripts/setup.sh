# shellcheck shell=bash
# Shared by scripts/demo and scripts/test (sourced, not run): installs what is missing, configures and
# builds. Everything is skipped that is already there, so that a second run costs milliseconds.
#
#   tandem_setup                      Debian packages, and LibTorch in .venv unless TANDEM_LIBTORCH is set
#   tandem_choose_libtorch VERSION    before tandem_setup: that release, in an environment of its own
#   tandem_install_peers              PyTorch with Python in .venv-peers, which scripts/bench --peers compares with
#   tandem_build PRESET [-D...] -- TARGET...   configures (if need be) and builds
#   tandem_mpirun N COMMAND...        runs a command on N ranks; tandem_mpirun_command N sets MPIRUN instead
#
# Nothing is written outside the tree except by apt-get. What apt-get and pip say goes to
# .cache/setup.log and is shown only when they fail.

TANDEM_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TANDEM_PACKAGES=(g++ cmake ninja-build ccache libopenmpi-dev openmpi-bin libcli11-dev
  nlohmann-json3-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev python3-venv clang-format)
# LibTorch's wheel, without its Python dependencies, and the two CUDA libraries that even its CPU library
# links, in the release that it was built against (CUDA 13.0.2).
TANDEM_WHEELS=(torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
# Another release of LibTorch, beside the default one: see tandem_choose_libtorch.
TANDEM_LIBTORCH_VERSION=""
# PyTorch itself, for scripts/bench --peers: what `import torch` and Gloo load, without compilers.
TANDEM_PEER_WHEELS=(torch==2.11.0 nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0
  nvidia-nccl-cu13==2.28.9 nvidia-nvshmem-cu13==3.4.5)
TANDEM_PEER_PACKAGES=("cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusparse,nvjitlink]==13.0.2"
  typing-extensions==4.15.0 filelock==4.3.1 sympy==1.14.0 networkx==3.6 jinja2==3.1.6 fsspec==2026.9.0)
TANDEM_LOG=$TANDEM_ROOT/.cache/setup.log

tandem_say() { printf '==> %s\n' "$*" >&2; }

tandem_fail() {
  printf 'error: %s\n' "$1" >&2
  shift
  if (($# > 0)); then printf '  %s\n' "$@" >&2; fi
  exit 1
}

# tandem_stage TEXT COMMAND...: one line for one stage, with the seconds it took; the log's end if it fails.
tandem_stage() {
  local text=$1 start=$SECONDS
  shift
  printf '==> %s ... ' "$text" >&2
  if "$@" >>"$TANDEM_LOG" 2>&1 </dev/null; then
    printf '%d s\n' $((SECONDS - start)) >&2
    return 0
  fi
  printf 'failed after %d s\n' $((SECONDS - start)) >&2
  # Addresses of mirrors say nothing about what is wrong; the whole text is in the log.
  tail -n 15 "$TANDEM_LOG" | sed -E "s#https?://[^ )]*#(address)#g; s#host='[^']*'#(address)#g; s/^/    /" >&2
  return 1
}

# One set-up or build at a time: two would write the same files. Held until tandem_unlock.
tandem_lock() {
  mkdir -p "$TANDEM_ROOT/.cache"
  command -v flock >/dev/null || return 0
  exec 9>"$TANDEM_ROOT/.cache/lock"
  if ! flock --nonblock 9; then
    tandem_say "another set-up or build of this tree is running: waiting for it"
    flock 9
  fi
}
tandem_unlock() { exec 9>&-; }

# One call for all: this runs at each start.
tandem_missing_packages() {
  local installed package
  installed=$(dpkg-query --show --showformat='${Package} ${db:Status-Status}\n' "${TANDEM_PACKAGES[@]}" 2>/dev/null || true)
  for package in "${TANDEM_PACKAGES[@]}"; do
    [[ $'\n'$installed$'\n' == *$'\n'"$package installed"$'\n'* ]] || echo "$package"
  done
}

tandem_install_packages() {
  if ! command -v dpkg-query >/dev/null; then
    local tool absent=()
    for tool in g++ cmake ninja mpirun python3 clang-format; do
      command -v "$tool" >/dev/null || absent+=("$tool")
    done
    if ((${#absent[@]} > 0)); then
      tandem_fail "this system has no Debian packages, and these tools are missing: ${absent[*]}" \
        "Install by hand what these Debian 12 packages hold, then run again:" "${TANDEM_PACKAGES[*]}"
    fi
    return 0
  fi

  local missing as_root=()
  mapfile -t missing < <(tandem_missing_packages)
  ((${#missing[@]} > 0)) || return 0
  if ! command -v apt-get >/dev/null; then
    tandem_fail "apt-get is not there, and these packages are missing: ${missing[*]}" \
      "Install them by hand, then run again."
  fi
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      tandem_fail "these packages are missing, and installing them takes root or sudo: ${missing[*]}" \
        "As root: apt-get install ${missing[*]}"
    fi
    tandem_say "sudo is used to install Debian packages: ${missing[*]}"
    sudo -v || tandem_fail "sudo was refused" "As root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  tandem_stage "Debian's package lists" "${as_root[@]}" apt-get update ||
    tandem_say "the lists could not be renewed; trying with those that are there"
  tandem_stage "Debian packages: ${missing[*]}" \
    "${as_root[@]}" apt-get install --yes --no-install-recommends "${missing[@]}" ||
    tandem_fail "apt-get could not install: ${missing[*]}" "Install them by hand, then run again."
}

tandem_check_libtorch() {
  local file
  for file in include/ATen/ATen.h lib/libtorch_cpu.so; do
    if [[ ! -e $TANDEM_LIBTORCH/$file ]]; then
      tandem_fail "TANDEM_LIBTORCH is '$TANDEM_LIBTORCH', which lacks $file" \
        "Set it to a LibTorch folder (the one with include/ and lib/), 2.11 or newer," \
        "or unset it: LibTorch is then installed into .venv."
    fi
  done
  # The build keeps the path: it must hold from any working folder.
  TANDEM_LIBTORCH=$(cd "$TANDEM_LIBTORCH" && pwd)
  export TANDEM_LIBTORCH
}

# tandem_make_venv FOLDER: a Python environment, made anew unless the one there works.
tandem_make_venv() {
  # Debian's python3-venv belongs to /usr/bin/python3, which need not be the first in PATH.
  local venv=$1 python=/usr/bin/python3
  [[ -x $python ]] || python=$(command -v python3) || tandem_fail "python3 is missing: install it, then run again"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    tandem_stage "Python environment ${venv##*/}" "$python" -m venv --clear "$venv" ||
      tandem_fail "$python could not make the environment $venv" "On Debian it needs the package python3-venv."
  fi
}

# tandem_pip FOLDER TEXT ARGUMENT...: installs into that environment.
tandem_pip() {
  local venv=$1 text=$2
  shift 2
  tandem_stage "$text into ${venv##*/}" \
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"
}

tandem_install_libtorch() {
  local venv=$TANDEM_ROOT/.venv stamp=$TANDEM_ROOT/.venv/tandem-wheels wanted=${TANDEM_WHEELS[*]}
  # The stamp is written last: an interrupted installation is taken up again.
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] &&
    compgen -G "$venv/lib/python3*/site-packages/torch/lib/libtorch_cpu.so" >/dev/null; then
    return 0
  fi
  tandem_make_venv "$venv"
  tandem_pip "$venv" "LibTorch (1.2 GB: ${TANDEM_WHEELS[*]})" --no-deps "${TANDEM_WHEELS[@]}" ||
    tandem_fail "pip could not install LibTorch" \
      "Without a package index: unpack a LibTorch archive and set TANDEM_LIBTORCH to its folder." \
      "All that was said: $TANDEM_LOG"
  printf '%s\n' "$wanted" >"$stamp"
}

# tandem_choose_libtorch VERSION: another release than the default one, checked as far as can be before
# anything is installed.
tandem_choose_libtorch() {
  local version=$1
  [[ $version =~ ^([0-9]+)\.([0-9]+)\.[0-9]+$ ]] ||
    tandem_fail "--libtorch takes a release such as 2.15.0, not '$version'"
  if ((BASH_REMATCH[1] < 2 || (BASH_REMATCH[1] == 2 && BASH_REMATCH[2] < 11))); then
    tandem_fail "LibTorch $version is too old: Tandem needs 2.11 or newer"
  fi
  if [[ -n ${TANDEM_LIBTORCH:-} ]]; then
    tandem_fail "--libtorch $version installs a LibTorch of its own, but TANDEM_LIBTORCH is '$TANDEM_LIBTORCH'" \
      "Use one of the two."
  fi
  if [[ " ${TANDEM_WHEELS[*]} " != *" torch==$version "* ]]; then TANDEM_LIBTORCH_VERSION=$version; fi
}

# That release in an environment of its own, and with it the two CUDA libraries that its CPU library links,
# in the release that its own metadata name. Sets TANDEM_LIBTORCH.
tandem_install_chosen_libtorch() {
  local version=$TANDEM_LIBTORCH_VERSION venv=$TANDEM_ROOT/.venv-libtorch-$TANDEM_LIBTORCH_VERSION cuda
  if [[ ! -f $venv/tandem-complete ]]; then
    tandem_make_venv "$venv"
    if ! tandem_pip "$venv" "LibTorch $version" --no-deps "torch==$version"; then
      rm -rf "$venv"
      tandem_fail "pip could not install torch==$version: is there such a release for this Python?" \
        "All that was said: $TANDEM_LOG"
    fi
    cuda=$("$venv/bin/python" - <<'PYTHON'
import importlib.metadata, re
for requirement in importlib.metadata.requires("torch"):
    toolkit = re.match(r"cuda-toolkit\[[^]]*\](==[0-9.]+)", requirement)
    if toolkit:
        print("cuda-toolkit[cudart,cupti]" + toolkit.group(1))
PYTHON
    )
    if [[ -n $cuda ]]; then
      tandem_pip "$venv" "what it links: $cuda" "$cuda" ||
        tandem_fail "pip could not install $cuda" "All that was said: $TANDEM_LOG"
    fi
    touch "$venv/tandem-complete"
  fi
  TANDEM_LIBTORCH=$(compgen -G "$venv/lib/python3*/site-packages/torch")
}

# PyTorch with Python in .venv-peers: an environment of its own, so that the library's stays small.
tandem_install_peers() {
  local venv=$TANDEM_ROOT/.venv-peers wanted="${TANDEM_PEER_WHEELS[*]} ${TANDEM_PEER_PACKAGES[*]}"
  if [[ -f $venv/tandem-wheels && $(<"$venv/tandem-wheels") == "$wanted" ]]; then return 0; fi
  tandem_lock
  tandem_make_venv "$venv"
  if ! { tandem_pip "$venv" "PyTorch (3 GB)" --no-deps "${TANDEM_PEER_WHEELS[@]}" &&
    tandem_pip "$venv" "what PyTorch loads" "${TANDEM_PEER_PACKAGES[@]}"; }; then
    tandem_fail "PyTorch could not be installed into .venv-peers" "All that was said: $TANDEM_LOG"
  fi
  printf '%s\n' "$wanted" >"$venv/tandem-wheels"
  tandem_unlock
}

tandem_setup() {
  tandem_lock
  : >"$TANDEM_LOG"
  # A wrong folder is said before anything is installed.
  if [[ -n ${TANDEM_LIBTORCH:-} ]]; then tandem_check_libtorch; fi
  tandem_install_packages
  if [[ -n $TANDEM_LIBTORCH_VERSION ]]; then
    tandem_install_chosen_libtorch
    tandem_check_libtorch
  elif [[ -z ${TANDEM_LIBTORCH:-} ]]; then
    tandem_install_libtorch
  fi
  tandem_unlock
}

# Compile jobs: one a core, as far as memory goes (a file that includes LibTorch takes up to 2 GB).
tandem_jobs() {
  local cores memory_kib jobs
  cores=$(nproc)
  memory_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo 2>/dev/null || true)
  jobs=$((${memory_kib:-2097152} / 2097152))
  ((jobs >= 1)) || jobs=1
  echo $((jobs < cores ? jobs : cores))
}

# tandem_build PRESET [CMAKE ARGUMENT...] [-- TARGET...]; sets BUILD_DIR. Arguments that begin with -D
# make a build folder of their own, so that one preset's folder never changes its meaning.
tandem_build() {
  local preset=$1 suffix="" arguments=() wanted start
  shift
  while (($# > 0)) && [[ $1 != -- ]]; do
    arguments+=("$1")
    suffix+="${1//[^A-Za-z0-9]/_}"
    shift
  done
  if (($# > 0)); then shift; fi
  suffix+=${TANDEM_LIBTORCH_VERSION:+-libtorch-$TANDEM_LIBTORCH_VERSION}
  BUILD_DIR=$TANDEM_ROOT/build/$preset$suffix
  arguments+=("-DTANDEM_LIBTORCH=${TANDEM_LIBTORCH:-}")
  wanted="$preset ${arguments[*]}"

  tandem_lock
  if [[ ! -f $BUILD_DIR/build.ninja || $(cat "$BUILD_DIR/tandem-configured" 2>/dev/null) != "$wanted" ]]; then
    tandem_say "configuring ${BUILD_DIR#"$TANDEM_ROOT"/}"
    (cd "$TANDEM_ROOT" && cmake --preset "$preset" -B "$BUILD_DIR" "${arguments[@]}") >"$TANDEM_LOG" 2>&1 </dev/null || {
      sed 's/^/    /' "$TANDEM_LOG" >&2
      tandem_fail "cmake could not configure the preset $preset"
    }
    printf '%s\n' "$wanted" >"$BUILD_DIR/tandem-configured"
  fi
  start=$SECONDS
  if [[ -f $BUILD_DIR/.ninja_log ]]; then
    tandem_say "building ${*:-everything} in ${BUILD_DIR#"$TANDEM_ROOT"/}"
  else
    tandem_say "building ${*:-everything} in ${BUILD_DIR#"$TANDEM_ROOT"/}: the first time takes minutes"
  fi
  cmake --build "$BUILD_DIR" --parallel "$(tandem_jobs)" ${1:+--target "$@"} >&2 </dev/null ||
    tandem_fail "the build failed: see above"
  tandem_say "built in $((SECONDS - start)) s"
  tandem_unlock
}

# Sets MPIRUN to the launcher's command for N ranks. Open MPI refuses root and more ranks than cores
# unless told otherwise; unbound, because by default it pins each of two ranks to one core, together with
# the thread that reduces for it. Threads: the cores are shared out, at least one a rank, unless
# OMP_NUM_THREADS is set.
tandem_mpirun_command() {
  local ranks=$1 threads
  threads=$(($(nproc) / ranks))
  ((threads >= 1)) || threads=1
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  MPIRUN=(mpirun)
  if mpirun --version 2>/dev/null | grep -q 'Open MPI\|OpenRTE'; then
    MPIRUN+=(--oversubscribe --bind-to none)
  fi
  MPIRUN+=(-np "$ranks")
}

tandem_mpirun() {
  local MPIRUN
  tandem_mpirun_command "$1"
  shift
  "${MPIRUN[@]}" "$@"
}
