#!/bin/bash
# check.sh BIN: are the generated files current, and do the linters find anything? Used by `make check`.
# PGQUE_REQUIRE=plpgsql_check makes it a failure when no local server has plpgsql_check.
set -uo pipefail
bin=$1 failed=() tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
here=tests/support
export PYTHONPATH=tests

step() { # TITLE COMMAND...: run it, show its output only if it failed
  local title=$1; shift
  if "$@" > "$tmp/out" 2>&1; then
    printf '  ok    %s\n' "$title"
  else
    printf '  FAIL  %s\n' "$title"; sed 's/^/        /' "$tmp/out" | tail -n 60
    failed+=("$title")
  fi
}

assembled()   { # and the manifest names every part
  diff <(cd sql/parts && find . -name '*.sql' | sed 's/^..//' | sort) <(sort sql/parts/manifest) \
    && (cd sql/parts && xargs cat < manifest) | diff -u sql/pgque.sql - | head -n 40
}
shipped()     { cmp sql/pgque.sql python/src/pgque/ops/pgque.sql; }
one_version() { # the control file, the SQL file and the Python package name one version
  local control python
  control=$(sed -n "s/^default_version *= *'\([^']*\)'.*/\1/p" sql/pgque.control)
  python=$("$bin/python" -c 'import pgque; print(pgque.__version__)')
  [ -n "$control" ] && [ "$control" = "$python" ] && grep -qF "'$control'" sql/pgque.sql && return
  echo "sql/pgque.control says '$control', the Python package '$python'; sql/pgque.sql must hold it too"; return 1
}
generated() { # KIND FILE MODULE...: what make KIND would write
  "$bin/python" -m "${@:3}" > "$tmp/new" || return
  diff -u "$2" "$tmp/new" > "$tmp/diff" && return
  head -n 60 "$tmp/diff"; echo "run: make $1"; return 1
}
# Programs of users: the Python blocks of each of these pages, typed_program.py, and those that are compared
pages=(README.md python/README.md python/docs/{tutorial,payloads,exactly-once,fan-out}.md)
users() { # COMMAND...: check these programs; each page is one
  rm -rf "$tmp/users" && mkdir "$tmp/users" || return
  "$bin/python" - "$tmp/users" "${pages[@]}" <<'END' || return
import pathlib, sys
from support.documents import read
folder = pathlib.Path(sys.argv[1])
for page in sys.argv[2:]:
    blocks = [block.code for block in read(pathlib.Path(page).read_text()) if block.language == "python"]
    name = page.removesuffix(".md").replace("/", "_").replace("-", "_")
    (folder / f"{name}.py").write_text("\n".join(blocks))
END
  echo '{"typeCheckingMode": "strict"}' > "$tmp/users/pyrightconfig.json"
  cp "$here/typed_program.py" tests/examples/compared/{shop,with_pgque/*}.py "$tmp/users" && "$@" "$tmp/users"
}
parses()  { "$bin/python" -c 'import pathlib, pglast; print(len(pglast.parse_sql(pathlib.Path("sql/pgque.sql").read_text())))'; }
sync()    { "$bin/python" python/tools/make_sync.py --check; }
options() { "$bin/python" python/tools/spark_options.py --check; }
counted() { "$bin/python" python/tools/compared.py --check; }
plpgsql() { "$bin/python" -m support.lint_plpgsql; }
pgspot()  { # told first that the schema is ours: the file creates it inside a DO block, which pgspot does not see
  { echo 'create schema pgque;'; cat sql/pgque.sql; } \
    | "$bin/pgspot" --no-plpgsql --ignore PS001 --ignore PS005 --ignore PS016 --ignore PS017
}
top() { # nothing but these at the top of the repository
  local extra
  extra=$(git ls-files 2>/dev/null | cut -d/ -f1 | sort -u \
    | grep -vxE 'sql|python|tests|Makefile|Dockerfile|README.md|LICENSE|CHANGELOG.md|\.gitignore|\.ci')
  [ -z "$extra" ] || { echo "not expected at the top: $extra"; return 1; }
}

step "sql/pgque.sql is the parts of the manifest" assembled
step "python/ ships the same SQL file" shipped
step "one version everywhere" one_version
step "top level of the repository" top
step "pglast parses sql/pgque.sql" parses
# Not asked: qualified operators, and a pinned search_path, in functions that run with the caller's own rights
# (PS001, PS005, PS016, PS017); plpgsql_check looks into the bodies, which pgspot's parser cannot follow.
step "pgspot" pgspot
step "sql/schema.txt is current (make schema)" generated schema sql/schema.txt support.catalog schema
step "sql/REFERENCE.md is current (make reference)" generated reference sql/REFERENCE.md support.catalog reference
step "sql/message.svg is current (make picture)" generated picture sql/message.svg support.picture message
step "sql/positions.svg is current (make picture)" generated picture sql/positions.svg support.picture positions
step "sync Python is generated from async" sync
step "python/SPARK.md has the options" options
step "comparison.md counts the programs, and none is longer with pgque" counted
step "codespell, proselint" "$bin/python" -m support.proofread
step "ruff check" "$bin/ruff" check --quiet python tests
step "ruff format" "$bin/ruff" format --check --quiet --exclude '*.md' --exclude twins python tests
step "mypy --strict, package" "$bin/mypy" --config-file python/pyproject.toml --no-error-summary python/src
step "mypy --strict, tests" "$bin/mypy" --config-file "$here/mypy.ini" --no-error-summary tests
step "mypy --strict, programs of users" users "$bin/mypy" --config-file "$here/mypy.ini" --no-error-summary
# Needs node, which pip's package fetches where there is none.
step "pyright, programs of users" users "$bin/pyright" --pythonpath "$bin/python" --project
plpgsql > "$tmp/plpgsql" 2>&1; code=$?
if [ $code = 77 ] && [[ ",${PGQUE_REQUIRE:-}," != *,plpgsql_check,* ]]; then
  printf '  skip  plpgsql_check: %s\n' "$(cat "$tmp/plpgsql")"
else
  step "plpgsql_check: $(tail -n 1 "$tmp/plpgsql")" bash -c 'cat "$1"; exit "$2"' _ "$tmp/plpgsql" $code
fi

if [ ${#failed[@]} -gt 0 ]; then echo "make check: ${#failed[@]} failed"; exit 1; fi
echo "make check: all good"
