#!/bin/bash
# spark.sh newest|4.0|4.1|4.2 [pip requirement...]: make the virtual environment .venv/spark (newest) or .venv/spark-4.0
# and so on with PySpark, pyarrow, this package and what the tests need, besides the requirements given; see that Java and
# PostgreSQL's JDBC driver are there, and install them where we are root on Debian. Prints only what takes time.
#   spark.sh jdbc   print where the JDBC driver is
# PYTHON names the Python to use, PGQUE_JDBC_JAR a JDBC driver, JAVA_HOME a Java.
set -euo pipefail
cd "$(dirname "$0")/../.."
support=tests/support
which=${1:-newest}; shift || true

say() { printf '%s\n' "$*" >&2; }
jar() { # the driver of the machine
  local file
  for file in "${PGQUE_JDBC_JAR:-}" /usr/share/java/postgresql.jar; do
    if [ -n "$file" ] && [ -r "$file" ]; then echo "$file"; return; fi
  done
  return 1
}
java_version() { # the major version of the Java that Spark will start
  local java=java
  if [ -n "${JAVA_HOME:-}" ]; then java=$JAVA_HOME/bin/java; fi
  "$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1
}
have_java() { local version; version=$(java_version) || return 1; [ "${version:-0}" -ge 17 ]; }
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
debian() { # PACKAGE...: the first of them that can be installed
  local package
  export DEBIAN_FRONTEND=noninteractive
  for package in "$@"; do
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "$package" >/dev/null 2>&1 && return
  done
  apt-get update -qq >/dev/null 2>&1 || true
  for package in "$@"; do
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "$package" >/dev/null 2>&1 && return
  done
  return 1
}

if ! have_java && can_install; then
  say "Installing Java for Spark ..."
  debian openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless || true
fi
if ! have_java; then
  say "Spark needs Java 17 or newer, and found ${JAVA_HOME:+in JAVA_HOME=$JAVA_HOME }$(java_version | sed 's/^/Java /' | grep . || echo none)."
  say "Debian and Ubuntu: sudo apt install openjdk-17-jre-headless; or set JAVA_HOME. Then run this again."
  exit 1
fi
if ! jar >/dev/null && can_install; then
  say "Installing PostgreSQL's JDBC driver ..."
  debian libpostgresql-jdbc-java || true
fi
if ! jar >/dev/null; then
  say "PostgreSQL's JDBC driver is missing. Debian and Ubuntu: sudo apt install libpostgresql-jdbc-java;"
  say "otherwise download it from jdbc.postgresql.org and set PGQUE_JDBC_JAR=/path/to/postgresql-42.x.jar. Then run this again."
  exit 1
fi

case $which in
  newest) dir=.venv/spark requirements=$support/requirements-spark.txt minor=11 ;;
  4.[012]) dir=.venv/spark-$which requirements=$support/requirements-spark-$which.txt minor=10 ;;
  jdbc) jar; exit ;;
  *) say "spark.sh: newest, 4.0, 4.1, 4.2 or jdbc, not '$which'"; exit 2 ;;
esac

# One at a time; nothing to do when a run before us had the same input, in this folder, with a Python still there.
mkdir -p .venv
if command -v flock >/dev/null; then exec 9> "$dir.lock"; flock 9; fi
needed="input $(cat "$support/spark.sh" "$requirements" $support/requirements.txt python/pyproject.toml | cksum) $(pwd -P)"
ready() {
  local line
  $dir/bin/python -c 'import pip' 2>/dev/null || return 1
  for line in "$needed" "$@"; do grep -qxF -- "$line" $dir/.ready 2>/dev/null || return 1; done
}
if ready "$@"; then exit 0; fi

new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $minor))" 2>/dev/null; }
python=
for candidate in "${PYTHON:-python3}" python3 python3.14 python3.13 python3.12 python3.11; do
  if new_enough "$candidate"; then python=$candidate; break; fi
done
spark=$(sed -n 's/^pyspark.*==//p' "$requirements")
if [ -z "$python" ]; then
  say "PySpark $spark needs Python 3.$minor or newer, and found only: $("${PYTHON:-python3}" --version 2>&1 || echo 'no python3')."
  say "Install one, or name it: make PYTHON=/path/to/python3.12 ..."
  exit 1
fi
say "Setting up $dir with PySpark $spark ..."
$support/venv.sh $dir "$python"
new_enough $dir/bin/python || { say "$dir has $($dir/bin/python --version), and PySpark $spark needs 3.$minor"; exit 1; }
pip() { $dir/bin/python -m pip --disable-pip-version-check "$@"; }

# PyPI has only the source, from which pip builds a wheel of 450 MB.
. $support/cache.sh
wheels=$PGQUE_CACHE/wheels
mkdir -p "$wheels"
wheel() { find "$wheels" -maxdepth 1 -name "pyspark-$spark-*.whl" | head -n 1; }
if [ -z "$(wheel)" ]; then
  new=$(mktemp -d "$wheels/.new-XXXXXX")
  trap 'rm -rf "$new"' EXIT
  pip wheel -q --no-deps -w "$new" "pyspark==$spark"
  mv "$new"/*.whl "$wheels/"
fi
if [ "$($dir/bin/python -c 'import pyspark; print(pyspark.__version__)' 2>/dev/null)" != "$spark" ]; then
  pip install -qq --no-compile "$(wheel)"
fi
# Spark puts this archive before the package on the path of its Python workers. Python compiles what it imports from an
# archive each time, which is 0.65 s of a core for each of the many processes that a query has. The package is the same
# code, and is compiled once.
rm -f $dir/lib/python3.*/site-packages/pyspark/python/lib/pyspark.zip
pip install -qq -r "$requirements" -r $support/requirements.txt -e "python[binary,embedded,spark]" "$@"
{ echo "$needed"; printf '%s\n' "$@"; grep -v '^input ' $dir/.ready 2>/dev/null || true; } > $dir/.ready.new
mv $dir/.ready.new $dir/.ready
