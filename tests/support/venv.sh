#!/bin/sh
# venv.sh DIR [PYTHON [arguments of pip install...]]: make a virtual environment with pip in DIR, if there is none
# that works, and install into it. One run at a time; whatever else lies in DIR is kept.
# Works on a Debian without python3-venv too: pip comes from outside or from the package index then, and only
# where neither can be had, and we are root, is python3-venv installed.
set -eu
dir=$1
wanted=${2:-python3}
if [ $# -gt 2 ]; then shift 2; else shift $#; fi
here=$(dirname "$0")

say() { printf '%s\n' "$*" >&2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
# The programs name their Python by its full path, which in a copy is another's, and leads nowhere after a move.
works() {
  version=$("$dir/bin/python" -m pip --version 2>/dev/null) && new_enough "$dir/bin/python" &&
    [ "$("$dir/bin/pip" --version 2>/dev/null)" = "$version" ]
}
empty() { rm -rf "$dir/bin" "$dir/lib" "$dir/lib64" "$dir/include" "$dir/share" "$dir/pyvenv.cfg"; }
try() { empty; "$@" >/dev/null 2>&1 && works; }
bare() { "$python" -m venv --without-pip "$dir"; }
pip_outside() { bare && "$python" -m pip --python "$dir/bin/python" install -qq pip; }
pip_fetched() { bare && "$dir/bin/python" "$here/get_pip.py"; }
from_debian() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "This Python has no venv module: installing Debian's python3-venv."
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; } \
    >/dev/null || return 1
  if ! new_enough /usr/bin/python3; then
    say "pgque needs Python 3.10 or newer; /usr/bin/python3 is $(/usr/bin/python3 --version 2>&1)."
    exit 1
  fi
  empty
  /usr/bin/python3 -m venv "$dir" && works
}

create() {
  python=
  for candidate in "$wanted" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if new_enough "$candidate"; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    say "pgque needs Python 3.10 or newer, and found only: $("$wanted" --version 2>&1 || echo 'no python3')."
    say "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
    exit 1
  fi
  try "$python" -m venv "$dir" || try "$python" -m virtualenv -q "$dir" ||
    try uv venv -q --seed --allow-existing --python "$python" "$dir" || try pip_outside || try pip_fetched ||
    from_debian || {
      empty
      say "Could not create a virtual environment with $python: it has no pip, and none could be fetched."
      say "Debian and Ubuntu: sudo apt install python3-venv (or: pip install --user virtualenv). Then run make again."
      exit 1
    }
}

mkdir -p "$dir"
if command -v flock >/dev/null; then exec 8> "$dir/.lock"; flock 8; fi
works || create
[ $# = 0 ] && exit
say "Installing Python packages into $dir"
"$dir/bin/python" -m pip install -qq --disable-pip-version-check "$@"
