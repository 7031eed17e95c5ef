#!/usr/bin/env bash
# Builds the native extension with sanitizers and runs the tests of the native kernels with it.
# Usage: tools/sanitize.sh [PYTEST ARGUMENTS]; PYTHON is an interpreter with the extra dev, BUILD a folder.
#
# SANITIZE=address (the default) uses AddressSanitizer and UndefinedBehaviorSanitizer. On x86-64, AVX-512 and AMX
# are emulated, so that every level runs on any CPU. EMULATE=OFF compiles for the hardware and runs only
# the levels that the CPU has. Leaks are not checked, because Python and MLX keep memory until they end.
# CMakeLists.txt names other checks that are left out.
#
# SANITIZE=thread uses ThreadSanitizer with four threads for the thread pool, captured steps and streams.
# Python and MLX are not instrumented, so their accesses are not checked. Failures of captured tasks are not
# checked either, because MLX's queue passes them to run_queued by a future that the checker does not see.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitize=${SANITIZE:-address}
python=${PYTHON:-python3} build=${BUILD:-build/sanitize-$sanitize}
PATH=$(dirname "$(command -v "$python")"):$PATH
emulate=OFF
[ "$(uname -m)" = x86_64 ] && [ "$sanitize" = address ] && emulate=${EMULATE:-ON}
mkdir -p "$build"
cmake -S . -B "$build" -DOCTAVO_SANITIZE="$sanitize" -DOCTAVO_EMULATE_X86="$emulate" -DOCTAVO_KERNEL_OPTIMIZATION=-O1 \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DSKBUILD_STATE=editable \
    -DPython_EXECUTABLE="$(command -v "$python")" >"$build/configure.log"
cmake --build "$build" --target _ext --parallel "${JOBS:-$(nproc)}" >"$build/build.log" 2>&1 ||
    { tail -n 40 "$build/build.log" >&2; exit 1; }
built=$(echo "$build"/_ext*.so)

# Python is not instrumented, so the sanitizers' runtimes must be loaded first.
runtime() { "${CXX:-c++}" -print-file-name="lib$1.so"; }
if [ "$sanitize" = thread ]; then
    echo 'race:run_queued' >"$build/suppressions"
    preload=$(runtime tsan)
    export OCTAVO_CPU_THREADS=4
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$(realpath "$build/suppressions")"
    [ $# -gt 0 ] || set -- tests/engine/executor/capture tests/engine/executor/native/test_{linear,program,step_memory}.py \
        -k "not level"
else
    preload="$(runtime asan) $(runtime ubsan)"
    export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
    [ $# -gt 0 ] || set -- tests/kernels/cpu tests/engine/executor/native
fi
LD_PRELOAD=$preload TEST_EXTENSION=$(realpath "$built") \
    "$python" -m pytest -q -p no:cacheprovider --capture=sys --timeout 1800 -o faulthandler_timeout=1800 "$@"  # reports are not captured
