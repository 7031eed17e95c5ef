#!/usr/bin/env bash
# Builds the source distribution and a wheel for this platform, as PyPI accepts them.
# Usage: tools/wheel.sh BIN [FOLDER] [OPTIONS OF python -m build]; BIN has the extra `dist`
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1 folder=${2:-dist}
shift $(($# < 2 ? $# : 2))

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$bin/python" -m build --outdir "$made" "$@" .
mkdir -p "$folder"
cp "$made"/*.tar.gz "$folder"
if [ "$(uname)" = Linux ]; then
    # libmlx.so is left out, because the extension finds it in the package mlx, next to itself.
    PATH=$(cd "$bin" && pwd):$PATH "$bin/auditwheel" repair --exclude libmlx.so -w "$folder" "$made"/*.whl
else
    cp "$made"/*.whl "$folder"
fi
ls -l "$folder"
