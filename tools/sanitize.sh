#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs the tests of the native
# kernels on it; on x86-64 with AVX-512 and AMX emulated, so that every level is run whatever the CPU.
# Usage: tools/sanitize.sh [PYTEST ARGUMENTS]; PYTHON is an interpreter with the extra dev, BUILD a folder.
# EMULATE=OFF compiles AVX-512 and AMX as they are and runs what the CPU has.
#
# Left out: leaks (Python and MLX keep memory to their end; the checker would report theirs alone), and what
# CMakeLists.txt names. Nothing else is suppressed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} build=${BUILD:-build/sanitize}
PATH=$(dirname "$(command -v "$python")"):$PATH
emulate=OFF
[ "$(uname -m)" = x86_64 ] && emulate=${EMULATE:-ON}
mkdir -p "$build"
cmake -S . -B "$build" -DOCTAVO_SANITIZE=ON -DOCTAVO_EMULATE_X86="$emulate" -DOCTAVO_KERNEL_OPTIMIZATION=-O1 \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DSKBUILD_STATE=editable \
    -DPython_EXECUTABLE="$(command -v "$python")" >"$build/configure.log"
cmake --build "$build" --target _ext --parallel "${JOBS:-$(nproc)}" >"$build/build.log" 2>&1 ||
    { tail -n 40 "$build/build.log" >&2; exit 1; }
built=$(echo "$build"/_ext*.so)

# Python is not instrumented: the runtimes must come first.
compiler=${CXX:-c++}
[ $# -gt 0 ] || set -- tests/kernels/cpu tests/engine/executor/native
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OCTAVO_TEST_EXTENSION=$(realpath "$built") \
    "$python" -m pytest -q -p no:cacheprovider --capture=sys --timeout 1800 "$@"  # reports are not captured
