#!/usr/bin/env bash
# Compiles every portable kernel for 64-bit ARM (NEON) and runs the check of pages and attention on an
# emulated CPU. Usage: tools/cross_aarch64.sh [FOLDER]; PYTHON is an interpreter that has MLX, for its headers.
set -euo pipefail
cd "$(dirname "$0")/.."

build=${1:-build/aarch64} python=${PYTHON:-python3}
compiler=${CROSS_CXX:-aarch64-linux-gnu-g++} emulator=${CROSS_RUN:-qemu-aarch64}
for tool in "$compiler" "$emulator"; do
    if ! command -v "$tool" >/dev/null; then
        echo "cross: $tool was not found; on Debian or Ubuntu install g++-aarch64-linux-gnu and qemu-user" >&2
        exit 2
    fi
done
mlx=$("$python" -c 'import importlib.util as u; print(u.find_spec("mlx").submodule_search_locations[0])')
flags=(-std=gnu++20 -O2 -Wall -Wextra -ffp-contract=off -pthread -DOCTAVO_ISA=generic -Ikernels/csrc "-isystem$mlx/include")
mkdir -p "$build"
objects=()
for source in kernels/csrc/*/*_portable.cpp kernels/csrc/attention/plan.cpp kernels/csrc/runtime/{dispatch,lines,threads}.cpp tests/cross/*.cpp; do
    object=$build/$(tr / - <<<"${source%.cpp}").o
    echo "cross: $source"
    "$compiler" "${flags[@]}" -c "$source" -o "$object"
    case $source in
        */attention/*.cpp | */pages/*.cpp | */runtime/dispatch.cpp | */runtime/lines.cpp | */runtime/threads.cpp | */check_*.cpp) objects+=("$object") ;;
    esac
done
"$compiler" "${objects[@]}" -static -pthread -o "$build/check"
"$emulator" "$build/check"
echo "cross: the kernels compile for $("$compiler" -dumpmachine), and pages and attention are right there"
