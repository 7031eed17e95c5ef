#!/usr/bin/env bash
# Runs clang-tidy on kernels, each with the flags of its level. Files that include MLX's headers are left out,
# because each takes seconds. So are attention and pages, because clang lacks GCC's __builtin_shuffle.
# Usage: tools/tidy.sh [FILE ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(uname -m)" != x86_64 ]; then
    echo "tidy: left out: the flags of the levels are x86-64's, and this is $(uname -m)"
    exit 0
fi
mapfile -t files < <(find kernels/csrc/{linear,ops,runtime,sampling} -name '*_portable.cpp' -o -name '*_avx2.cpp' \
    -o -name '*_avx512.cpp' -o -name '*_amx.cpp' | sort)
[ $# -eq 0 ] || files=("$@")

check() {
    level=generic flags=()
    case $1 in
        *_avx2.cpp) level=avx2 flags=(-march=x86-64-v3) ;;
        *_avx512.cpp) level=avx512 flags=(-march=x86-64-v4 -mavx512bf16 -mavx512vnni) ;;
        *_amx.cpp) level=amx flags=(-march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8) ;;
    esac
    clang-tidy --quiet "$1" -- -std=gnu++20 -DOCTAVO_ISA="$level" -Ikernels/csrc -Wno-unknown-pragmas "${flags[@]}" \
        2> >(grep -v 'warnings generated\|Suppressed' >&2)
}
export -f check
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'check "$0"'
echo "tidy: ${#files[@]} files are clean"
