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
