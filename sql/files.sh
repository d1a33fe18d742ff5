#!/bin/sh
# files.sh DIR: put the files of the extension into DIR, for packages and images: `make install` needs a server's
# build files. The versions are those of the Makefile beside this script.
set -eu
here=$(dirname "$0")
version=$(sed -n "s/^default_version *= *'\([^']*\)'.*/\1/p" "$here/pgque.control")
earlier=$(sed -n 's/^EARLIER *:= *//p' "$here/Makefile")
[ -n "$version" ] && [ -n "$earlier" ]
mkdir -p "$1"
cp "$here/pgque.control" "$1/pgque.control"
cp "$here/pgque.sql" "$1/pgque--$version.sql"
for from in $earlier; do ln -sf "pgque--$version.sql" "$1/pgque--$from--$version.sql"; done
chmod 644 "$1/pgque.control" "$1/pgque--$version.sql"
