#!/usr/bin/env bash
# Makes a virtual environment and installs Octavo into it, editable, so that it runs this folder's sources.
# Usage: tools/install.sh PYTHON VENV REQUIREMENT   (REQUIREMENT: "." or ".[dev]")
set -euo pipefail

python=$1 venv=$2 requirement=$3

if ! command -v "$python" >/dev/null; then
    echo "octavo: '$python' was not found; install Python 3.11 or newer, or say 'make PYTHON=/path/to/python3.11 ...'" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "octavo: needs Python 3.11 or newer, but '$python' is $("$python" -V 2>&1); say 'make PYTHON=/path/to/python3.11 ...'" >&2
    exit 2
fi
if [ ! -x "$venv/bin/python" ]; then
    echo "octavo: making $venv with $("$python" -V)"
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        echo "octavo: '$python -m venv $venv' failed; on Debian or Ubuntu install the package python3-venv" >&2
        exit 2
    fi
fi

log=$venv/install.log
echo "octavo: building and installing $requirement; the first time takes a minute or two (log: $log)"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check -e "$requirement" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    echo "octavo: the installation failed; the whole log is in $log" >&2
    exit 1
fi
if "$venv/bin/python" -c 'from octavo.kernels import _ext' 2>/dev/null; then
    echo "octavo: installed with native CPU kernels"
elif [ "$(uname)" != Darwin ]; then
    echo "octavo: installed WITHOUT native CPU kernels: the slow reference path is in use."
    if command -v "${CXX:-c++}" >/dev/null; then
        echo "octavo: ${CXX:-c++} could not build them; the reason is in $log"
    else
        echo "octavo: install a C++20 compiler (Debian: g++), then run 'make clean' and this target again"
    fi
fi
