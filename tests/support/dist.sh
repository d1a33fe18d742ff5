#!/bin/bash
# dist.sh BIN: write the packages of this version into build/dist. Used by `make dist`.
# What needs a program that is not here is left out, and named: PGQUE_REQUIRE=dist makes that a failure.
set -euo pipefail
bin=$(cd "$1" && pwd) out=$PWD/build/dist
version=$(sed -n "s/^default_version *= *'\([^']*\)'.*/\1/p" sql/pgque.control)
debian_version=${version/-/"~"} status=stable; [[ $version != *-rc* ]] || status=testing
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
rm -rf "$out"; mkdir -p "$out"

missing() { # WHAT PROGRAM
  [[ ",${PGQUE_REQUIRE:-}," != *,dist,* ]] || { echo "dist: no $1: it needs $2" >&2; exit 1; }
  echo "  skip  $1: it needs $2"
}

python_package() { # the wheel is built from the sdist
  "$bin/python" -m build --no-isolation --outdir "$out" python > "$work/log" 2>&1 || { cat "$work/log" >&2; return 1; }
  "$bin/python" -m twine check --strict "$out"/*.whl "$out"/*.tar.gz
}

pgxn() {
  local folder=$work/pgque-$version
  mkdir -p "$folder/doc"
  cp sql/Makefile sql/pgque.control sql/pgque.sql README.md CHANGELOG.md LICENSE "$folder"
  cp sql/REFERENCE.md "$folder/doc/pgque.md"
  sed "s/@VERSION@/$version/; s/@STATUS@/$status/" sql/META.json.in > "$folder/META.json"
  (cd "$work" && "$bin/python" -m zipfile -c "$out/pgque-$version.zip" "pgque-$version")
}

debian() { # MAJOR: the package for PostgreSQL MAJOR, which is only files
  local name=postgresql-$1-pgque root=$work/debian-$1 doc
  doc=$root/usr/share/doc/$name
  mkdir -p "$root/DEBIAN" "$doc"
  sh sql/files.sh "$root/usr/share/postgresql/$1/extension"
  cp LICENSE "$doc/copyright"
  gzip -9n < CHANGELOG.md > "$doc/CHANGELOG.md.gz"
  chmod -R u=rwX,go=rX "$root"
  cat > "$root/DEBIAN/control" <<END
Package: $name
Version: $debian_version
Architecture: all
Maintainer: The pgque authors
Section: database
Priority: optional
Depends: postgresql-$1
Suggests: postgresql-$1-cron
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f 1)
Description: message queue and shared event log inside PostgreSQL $1
 Queues, work queues and event logs as an extension in plain PL/pgSQL.
 Run "create extension pgque" in a database to use it.
END
  dpkg-deb --root-owner-group -Zxz --build "$root" "$out" > /dev/null
}

image() {
  tar -cf - Dockerfile sql | docker build -q -t "pgque-extension:$version" --target extension - > "$work/log" 2>&1 || { cat "$work/log" >&2; return 1; }
  docker save "pgque-extension:$version" | gzip -n > "$out/pgque-extension-$version.image.tar.gz"
}

python_package
pgxn
if command -v dpkg-deb > /dev/null; then for major in 14 15 16 17 18; do debian $major; done; else missing "Debian packages" dpkg-deb; fi
if docker info > /dev/null 2>&1; then image; else missing image "a container engine"; fi
ls -sh "$out" | tail -n +2
