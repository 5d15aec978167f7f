# Sourced by the scripts beside it: prepare_venv [test] leaves a virtual environment with moe_tk in $root/.venv.
# Reads MOE_TK_TORCH_SPEC: the pip requirement for torch (default: torch>=2.9).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv_python=$root/.venv/bin/python

give_up() {  # each argument is one line
    printf '%s\n' "$@" >&2
    exit 2
}

check_python() {
    command -v python3 >/dev/null || give_up "python3 is missing. Install it (Debian, Ubuntu: apt-get install python3)."
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        give_up "python3 is $(python3 -c 'import platform; print(platform.python_version())'), wanted >= 3.10." \
            "Put a newer python3 first on PATH."
    python3 -c 'import venv, ensurepip' 2>/dev/null ||
        give_up "python3 -m venv does not work: its modules are missing." \
            "Install them (Debian, Ubuntu: apt-get install python3-venv)."
    python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        give_up "The C headers of Python are missing (Python.h)." \
            "Install them (Debian, Ubuntu: apt-get install python3-dev; Fedora: python3-devel)."
}

check_compiler() {
    local compiler
    for compiler in ${CXX:+"$CXX"} g++ clang++ c++; do
        # $compiler is split on purpose: CXX may be "ccache g++"
        # no pipe: a compiler that fails before it has read its input would fail the writer too
        if $compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null \
            <<<$'#include <atomic>\n#include <concepts>\nstatic_assert(__cplusplus > 201703L);'; then
            return
        fi
    done
    give_up "No C++20 compiler works (tried ${CXX:+CXX=$CXX, }g++, clang++, c++)." \
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: gcc-c++) or set CXX to g++ >= 11 or clang++ >= 15."
}

wanted_state() {  # changes when another install is needed
    { cat "$root/pyproject.toml" "$root/setup.py"; echo "$root ${MOE_TK_TORCH_SPEC:-}"; python3 --version; } | cksum
}

is_installed() {  # EXTRA STATE: what has the test extra is good for the demo too
    grep -qsxF "$2" "$root/.venv/installed-test" || { [ -z "$1" ] && grep -qsxF "$2" "$root/.venv/installed"; }
}

prepare_venv() {
    local extra=${1:-} state
    check_python
    check_compiler
    exec 9<"$root/pyproject.toml"
    ! command -v flock >/dev/null || flock 9  # two scripts at once: the second waits for the first to install
    state=$(wanted_state)
    if ! is_installed "$extra" "$state"; then
        install_package "$extra"
        echo "$state" >"$root/.venv/installed${extra:+-$extra}"
    fi
    exec 9<&-
}

install_package() {
    local extra=$1 spec=${MOE_TK_TORCH_SPEC:-torch>=2.9}
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
        echo "Making the virtual environment $root/.venv" >&2
        rm -rf "$root/.venv"
        python3 -m venv "$root/.venv"
    fi
    rm -f "$root"/.venv/installed*
    if [ ! -e /dev/nvidia0 ] && [ -z "${MOE_TK_TORCH_SPEC:-}" ] && ! "$venv_python" -m pip show -q torch 2>/dev/null; then
        echo "No NVIDIA GPU is seen, but pip may choose a build of torch for CUDA (several GB). To choose another, set" \
            "MOE_TK_TORCH_SPEC, and PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where a CPU build is." >&2
    fi
    echo "Installing moe_tk${extra:+ [$extra]} and what it needs into $root/.venv" >&2
    "$venv_python" -m pip install --quiet --disable-pip-version-check "$spec" -e "$root${extra:+[$extra]}" >&2 </dev/null
}
