#!/bin/bash
# peers.sh: make the virtual environment .venv/peers with the systems that the benchmarks compare with, what draws
# their plots, and this package. Prints only what takes time. PYTHON names the Python to use.
set -euo pipefail
cd "$(dirname "$0")/../.."
support=tests/support dir=.venv/peers requirements=$support/requirements-peers.txt

# One at a time; nothing to do when a run before us had the same input, in this folder, with a Python still there.
mkdir -p .venv
if command -v flock >/dev/null; then exec 9> "$dir.lock"; flock 9; fi
needed="input $(cat "$support/peers.sh" "$requirements" $support/requirements-compared.txt python/pyproject.toml | cksum) $(pwd -P)"
if $dir/bin/python -c 'import pip' 2>/dev/null && grep -qxF -- "$needed" $dir/.ready 2>/dev/null; then exit 0; fi

printf '%s\n' "Setting up $dir ..." >&2
$support/venv.sh $dir "${PYTHON:-python3}"
$dir/bin/python -m pip install -qq --disable-pip-version-check -r "$requirements" -e "python[binary]"
echo "$needed" > $dir/.ready
