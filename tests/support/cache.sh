# Sourced. Sets PGQUE_CACHE, the folder for what is fetched once. Root keeps it where the account that
# runs the server can read it.
if [ -z "${PGQUE_CACHE:-}" ]; then
  if [ "$(id -u)" = 0 ]; then PGQUE_CACHE=/var/cache/pgque; else PGQUE_CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/pgque; fi
fi
mkdir -p "$PGQUE_CACHE"
export PGQUE_CACHE

# Print the Debian mirror that this machine's apt is set up with.
debian_mirror() {
  list() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "$@"; }
  # Labels are known only after an update.
  if [ -z "$(list 'Label: Debian')" ] && [ "$(id -u)" = 0 ]; then apt-get update -qq >/dev/null 2>&1 || true; fi
  { list 'Label: Debian'; list | grep '/debian/$'; } | head -n 1
}

# private_apt DIR SUITE: set `apt` to a call of apt-get with lists and archives of its own in DIR,
# for a suite of Debian that need not be this machine's. Nothing is installed by it.
private_apt() {
  local dir=$1 suite=$2 keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror
  command -v apt-get >/dev/null || { echo "packages of Debian $suite need apt-get (Debian or Ubuntu)" >&2; return 1; }
  mirror=$(debian_mirror || true)
  [ -n "$mirror" ] || { echo "this machine's apt knows no Debian mirror" >&2; return 1; }
  mkdir -p "$dir"/{lists/partial,archives/partial}
  : > "$dir/status"
  echo "deb [signed-by=$keyring] $mirror $suite main" > "$dir/sources.list"
  apt=(apt-get -qq -o Dir::Etc::sourcelist="$dir/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$dir/lists"
    -o Dir::State::status="$dir/status" -o Dir::Cache="$dir" -o Acquire::Languages=none -o APT::Sandbox::User="$(id -un)"
    -o APT::Install-Recommends=false -o Dpkg::Use-Pty=0 -o Debug::NoLocking=true)
  "${apt[@]}" update
}
