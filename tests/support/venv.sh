#!/bin/sh
# venv.sh DIR [PYTHON]: create a virtual environment with pip in DIR, if it is not there yet.
# Works on a Debian without python3-venv too, as long as pip, virtualenv or uv is there, or we are root.
set -eu
dir=$1
wanted=${2:-python3}

say() { printf '%s\n' "$*" >&2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
works() { "$dir/bin/python" -m pip --version >/dev/null 2>&1 && new_enough "$dir/bin/python"; }

[ -d "$dir" ] && works && exit 0
rm -rf "$dir"

python=
for candidate in "$wanted" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
  if new_enough "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  say "pgque needs Python 3.10 or newer, and found only: $("$wanted" --version 2>&1 || echo 'no python3')."
  say "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
  exit 1
fi

"$python" -m venv "$dir" >/dev/null 2>&1 && works && exit 0
rm -rf "$dir"
"$python" -m virtualenv -q "$dir" >/dev/null 2>&1 && works && exit 0
rm -rf "$dir"
command -v uv >/dev/null && uv venv -q --seed --python "$python" "$dir" 2>/dev/null && works && exit 0
rm -rf "$dir"
# pip outside can put pip inside.
"$python" -m venv --without-pip "$dir" >/dev/null 2>&1 \
  && "$python" -m pip --python "$dir/bin/python" install -qq pip >/dev/null 2>&1 && works && exit 0
rm -rf "$dir"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  say "This Python has no venv module: installing Debian's python3-venv."
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; } >/dev/null
  python=/usr/bin/python3
  if ! new_enough "$python"; then
    say "pgque needs Python 3.10 or newer; $python is $("$python" --version 2>&1)."
    exit 1
  fi
  "$python" -m venv "$dir" && works && exit 0
fi
say "Could not create a virtual environment with $python: its venv module is missing."
say "Debian and Ubuntu: sudo apt install python3-venv (or: pip install --user virtualenv). Then run make again."
exit 1
