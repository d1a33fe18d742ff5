#!/bin/bash
# Entry script of the image: makes the cluster at the first start, then becomes the server.
# Understands what users of the official PostgreSQL image expect: POSTGRES_PASSWORD, POSTGRES_USER, POSTGRES_DB
# (each also as NAME_FILE), POSTGRES_HOST_AUTH_METHOD, POSTGRES_INITDB_ARGS and /docker-entrypoint-initdb.d.
set -euo pipefail

case "${1:-postgres}" in
  -*) set -- postgres "$@" ;;
  postgres) ;;
  *) exec "$@" ;;
esac

if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA"
  chown -R postgres:postgres "$PGDATA"
  chmod 700 "$PGDATA"
  exec setpriv --reuid=postgres --regid=postgres --init-groups -- "$0" "$@"
fi

setting() { # NAME [DEFAULT]: the value of NAME, or the content of the file that NAME_FILE names
  local file=${1}_FILE
  if [ -n "${!file:-}" ]; then cat "${!file}"; else printf '%s' "${!1:-${2:-}}"; fi
}

if [ ! -s "$PGDATA/PG_VERSION" ]; then
  password=$(setting POSTGRES_PASSWORD)
  user=$(setting POSTGRES_USER postgres)
  database=$(setting POSTGRES_DB "$user")
  auth=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
  if [ -z "$password" ] && [ "$auth" != trust ]; then
    echo "Set a password for the superuser: docker run -e POSTGRES_PASSWORD=... (or, for tests on a closed" >&2
    echo "network, -e POSTGRES_HOST_AUTH_METHOD=trust, which lets everybody in)." >&2
    exit 1
  fi
  # shellcheck disable=SC2086
  initdb -D "$PGDATA" -U "$user" -E UTF8 --locale-provider=builtin --builtin-locale=C.UTF-8 --locale=C.UTF-8 \
    --auth-local=trust --auth-host="$auth" --pwfile=<(printf '%s\n' "$password") ${POSTGRES_INITDB_ARGS:-} >/dev/null
  echo "host all all all $auth" >> "$PGDATA/pg_hba.conf"
  quoted() { printf "'%s'" "${1//\'/\'\'}"; }
  cat >> "$PGDATA/postgresql.conf" <<CONF

listen_addresses = '*'
shared_preload_libraries = 'pg_cron'
cron.database_name = $(quoted "$database")
# Jobs connect through the socket, which asks for no password.
cron.host = '/var/run/postgresql'
CONF

  # Reachable through the socket only, until everything is in place. Its log is shown if something fails.
  log=$(mktemp)
  trap 'cat "$log" >&2' ERR
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses=''" -l "$log" start >/dev/null
  sql() { psql -X -q -v ON_ERROR_STOP=1 -U "$user" "$@"; }
  if [ "$database" != postgres ]; then
    sql -d postgres -v name="$database" <<< 'create database :"name"'
  fi
  sql -d "$database" -c 'create extension pg_cron'
  sql -d "$database" -1 -f /usr/share/pgque/pgque.sql
  sql -d "$database" -o /dev/null -c 'select pgque.start()'
  for file in /docker-entrypoint-initdb.d/*; do
    case $file in
      *.sh) . "$file" ;;
      *.sql) sql -d "$database" -f "$file" ;;
      *.sql.gz) gunzip -c "$file" | sql -d "$database" ;;
    esac
  done
  pg_ctl -D "$PGDATA" -w -m fast stop >/dev/null
  trap - ERR
  rm -f "$log"
fi

exec "$@"
