#!/usr/bin/env bash
# Make an environment with the oldest or the newest versions that pyproject.toml allows:
# environment.sh oldest|newest PYTHON FOLDER [CONSTRAINT...]
#
# A constraint such as torch==2.13.0 sets a version that is at hand. What is installed is listed in FOLDER/versions.txt.
set -euo pipefail
case $1 in
    oldest) resolution=lowest-direct ;; # the lower bounds, and of what only they need the newest
    newest) resolution=highest ;;
    *) echo "error: $1, expected oldest or newest" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$3
"$2" -m venv "$folder"
"$folder/bin/python" -m pip install -qq uv
install() { "$folder/bin/uv" pip install -q --python "$folder/bin/python" "$@"; }
install --resolution "$resolution" --only-binary :all: -c <(printf '%s\n' "${@:4}") -r pyproject.toml --extra dev
install --no-deps --no-build-isolation -e .
install --no-deps --target "$folder/older" "tensordict==$(sed -n 's/^OLDER_TENSORDICT := //p' Makefile)"
"$folder/bin/uv" pip freeze -q --python "$folder/bin/python" >"$folder/versions.txt"
