#!/bin/bash
# tmpdir.sh: print the folder for servers and files of the tests: TMPDIR, or in memory, where there is much. The
# tests make and drop thousands of databases, and half of their time goes to the file system.
if [ -n "${TMPDIR:-}" ]; then
  echo "$TMPDIR"
elif [ -w /dev/shm ] && [ "$(df --output=avail -BG /dev/shm 2>/dev/null | tr -dc 0-9)" -ge 12 ] &&
  [ "$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo 2>/dev/null)" -ge 16 ]; then
  echo /dev/shm
else
  echo /tmp
fi
