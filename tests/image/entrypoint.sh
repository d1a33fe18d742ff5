#!/bin/bash
# Entry script of the image: makes the cluster at the first start, then becomes the server.
# Understands what users of the official PostgreSQL image expect: POSTGRES_PASSWORD, POSTGRES_USER, POSTGRES_DB,
# POSTGRES_INITDB_ARGS (each also as NAME_FILE), POSTGRES_HOST_AUTH_METHOD and /docker-entrypoint-initdb.d.
set -euo pipefail

case "${1:-postgres}" in
  -*) set -- postgres "$@" ;;
  postgres) ;;
  *) exec "$@" ;;
esac

fail() { printf '%s\n' "$@" >&2; exit 1; }

setting() { # NAME [DEFAULT]: export NAME; its value may be in the file that NAME_FILE names
  local name=$1 file=${1}_FILE value=${!1:-}
  if [ -n "${!file:-}" ]; then
    [ -z "$value" ] || fail "Both $name and $file are set: give one of them."
    value=$(cat "${!file}")
  fi
  export "$name=${value:-${2:-}}"
  unset "$file"
}

# There from before initdb until the end of the set-up, so that one that was cut off is noticed.
unfinished=$PGDATA/pgque.unfinished
first=
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  first=yes
  # While we are root: a secret may be for root alone.
  setting POSTGRES_PASSWORD
  setting POSTGRES_USER postgres
  setting POSTGRES_DB "$POSTGRES_USER"
  setting POSTGRES_INITDB_ARGS
fi

if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA"
  chown -R postgres:postgres "$PGDATA"
  chmod 700 "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --init-groups -- "$0" "$@"
fi

if [ -e "$unfinished" ]; then
  fail "The set-up of $PGDATA was cut off or failed: pgque may be missing, or what the init scripts do." \
    "If there is nothing to keep, remove the volume (docker rm -v CONTAINER, docker volume rm VOLUME) and" \
    "start again. To go on with what there is, see that it is complete and remove $unfinished."
fi

sql() { psql -X -q -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" "$@"; }
quoted() { printf "'%s'" "${1//\'/\'\'}"; }

set_up() {
  local auth=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256} log file
  # shellcheck disable=SC2086
  initdb -D "$unfinished" -U "$POSTGRES_USER" -E UTF8 --locale-provider=builtin --builtin-locale=C.UTF-8 \
    --locale=C.UTF-8 --auth-local=trust --auth-host="$auth" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") \
    $POSTGRES_INITDB_ARGS >/dev/null
  mv "$unfinished"/* "$PGDATA"
  echo "host all all all $auth" >> "$PGDATA/pg_hba.conf"
  cat >> "$PGDATA/postgresql.conf" <<CONF

listen_addresses = '*'
shared_preload_libraries = 'pg_cron'
cron.database_name = $(quoted "$POSTGRES_DB")
# Jobs connect through the socket, which asks for no password.
cron.host = '/var/run/postgresql'
CONF

  # Reachable through the socket only, until everything is in place. Its log is shown if something fails.
  log=$(mktemp)
  trap 'cat "$log" >&2' ERR
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses=''" -l "$log" start >/dev/null
  if [ "$POSTGRES_DB" != postgres ]; then
    sql -d postgres -v name="$POSTGRES_DB" <<< 'create database :"name"'
  fi
  sql -c 'create extension pg_cron'
  sql -1 -f /usr/share/pgque/pgque.sql
  sql -o /dev/null -c 'select pgque.start()'
  for file in /docker-entrypoint-initdb.d/*; do
    case $file in
      # What can not be run is sourced, by itself, so that its `exit 0` ends no more than it.
      *.sh) if [ -x "$file" ]; then "$file"; else (set +u; . "$file"); fi ;;
      *.sql) sql -f "$file" ;;
      *.sql.gz) gunzip -c "$file" | sql ;;
    esac
  done
  pg_ctl -D "$PGDATA" -w -m fast stop >/dev/null
  rm -f "$log"
  rmdir "$unfinished"
}

abandon() { # CODE: end what the set-up started, and this
  trap '' TERM INT
  kill -- "-$child" 2>/dev/null || true
  pg_ctl -D "$PGDATA" -w -m immediate stop >/dev/null 2>&1 || true
  exit "$1"
}

if [ "$first" ]; then
  if [ -z "$POSTGRES_PASSWORD" ] && [ "${POSTGRES_HOST_AUTH_METHOD:-}" != trust ]; then
    fail "Set a password for the superuser: docker run -e POSTGRES_PASSWORD=... (or, for tests on a closed" \
      "network, -e POSTGRES_HOST_AUTH_METHOD=trust, which lets everybody in)."
  fi
  install -d -m 700 "$PGDATA"
  if [ -n "$(ls -A "$PGDATA")" ]; then
    fail "$PGDATA is not empty, and holds no cluster: give an empty volume, or set PGDATA to a folder in it."
  fi
  # In the background, in a process group of its own: docker stop is heeded at once then, not after the command.
  child=
  trap 'abandon 143' TERM INT
  set -m
  set_up < /dev/null & child=$!
  set +m
  wait "$child" || abandon $?
  trap - TERM INT
  unset POSTGRES_PASSWORD   # the server needs it no more
fi

exec "$@"
