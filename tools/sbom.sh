#!/usr/bin/env bash
# Writes the packages of an installation as a CycloneDX 1.6 document: version, licence and source of each.
# The script makes the installation; packages that only compile the extension (nanobind) are not in it.
# Usage: tools/sbom.sh BIN FILE [REQUIREMENT]; BIN has the extra `dist`, REQUIREMENT is ".[http,tracing]"
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1 file=$2 requirement=${3:-".[http,tracing]"}

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$bin/python" -m venv --without-pip "$made/venv"
"$bin/python" -m pip --python "$made/venv/bin/python" install --quiet "$requirement"
mkdir -p "$(dirname "$file")"
"$bin/cyclonedx-py" environment --pyproject pyproject.toml --mc-type application --output-reproducible \
    --spec-version 1.6 --output-format JSON --output-file "$file" --validate "$made/venv/bin/python"
echo "wrote $file"
