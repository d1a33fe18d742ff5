#!/bin/bash
# docker.sh up [FILE]|down: make a container engine, Docker Compose and the base image available, for machines that
#      have none of them.
# up   prints `export ...` lines to eval, and makes the base image itself where no registry is reached. FILE is
#      made when it starts an engine: then it is for the same run to end it.
# down ends the engine that an up started.
# Where an engine already answers, up only looks for the base image. Starting one needs root and Debian's docker.io.
set -euo pipefail
. "$(dirname "$0")/cache.sh"
base=debian:trixie-slim
state=${PGQUE_DOCKER_STATE:-/var/tmp/pgque-docker}   # the engine's data: not in a small /run, kept between runs
socket=/run/pgque-docker.sock
pidfile=/run/pgque-docker.pid
say() { echo "docker.sh: $*" >&2; }

client() { # a client as old as the engine: a newer one may refuse to talk to it
  if [ -x /usr/bin/docker ] && [ "${DOCKER_HOST:-}" = "unix://$socket" ]; then /usr/bin/docker "$@"; else docker "$@"; fi
}

start_engine() {
  [ "$(id -u)" = 0 ] || { say "no container engine answers, and starting one needs root"; return 1; }
  if ! command -v dockerd >/dev/null || ! command -v iptables >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables; } >/dev/null 2>&1 \
      || { say "docker.io cannot be installed"; return 1; }
  fi
  export DOCKER_HOST=unix://$socket
  if ! client info >/dev/null 2>&1; then
    mkdir -p "$state"
    rm -f "$pidfile" "$socket"
    [ -z "$started" ] || : > "$started"
    setsid dockerd --host "$DOCKER_HOST" --pidfile "$pidfile" --data-root "$state/data" --exec-root "$state/exec" \
      > "$state/dockerd.log" 2>&1 < /dev/null &
    for _ in $(seq 150); do
      client info >/dev/null 2>&1 && break
      kill -0 $! 2>/dev/null || break
      sleep 0.2
    done
    client info >/dev/null 2>&1 || { say "dockerd did not start:"; tail -n 5 "$state/dockerd.log" >&2; return 1; }
  fi
  echo "export DOCKER_HOST=$DOCKER_HOST"
}

base_image() {
  client image inspect "$base" >/dev/null 2>&1 && return
  timeout 120 "$(command -v docker)" pull -q "$base" >/dev/null 2>&1 && return
  local archive=$PGQUE_CACHE/base-trixie.tar root mirror
  if [ ! -s "$archive" ]; then
    [ "$(id -u)" = 0 ] || { say "$base cannot be pulled, and making it needs root"; return 1; }
    command -v debootstrap >/dev/null \
      || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap; } >/dev/null 2>&1
    mirror=$(debian_mirror || true)
    root=$(mktemp -d "$PGQUE_CACHE/.new-XXXXXX")
    debootstrap --variant=minbase trixie "$root" "$mirror" >"$root.log" 2>&1 \
      || { say "debootstrap failed:"; tail -n 5 "$root.log" >&2; rm -rf "$root" "$root.log"; return 1; }
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -cf "$archive.new" . && mv "$archive.new" "$archive"
    rm -rf "$root" "$root.log"
  fi
  client import "$archive" "$base" >/dev/null
}

compose() { # Docker Compose 2, which docker.io of Debian 12 and Ubuntu has no package of; its program runs alone
  local program=$PGQUE_CACHE/docker-compose work
  docker compose version >/dev/null 2>&1 && return
  if [ ! -x "$program" ]; then
    work=$(mktemp -d "$PGQUE_CACHE/.new-XXXXXX")
    if private_apt "$work" trixie && (cd "$work" && "${apt[@]}" download docker-compose && dpkg-deb -x docker-compose_*.deb .) >/dev/null
    then mv "$work/usr/libexec/docker/cli-plugins/docker-compose" "$program"
    else say "Docker Compose cannot be had"
    fi
    rm -rf "$work"
  fi
  [ ! -x "$program" ] || echo "export PGQUE_COMPOSE=$program"
}

started=${2:-}
case ${1:-} in
  up)
    if docker info >/dev/null 2>&1; then :; else start_engine; fi
    base_image
    compose
    # Ryuk's image cannot be pulled where the base could not; the tests remove their containers themselves.
    echo "export TESTCONTAINERS_RYUK_DISABLED=true"
    ;;
  down)
    if [ -s "$pidfile" ]; then
      pid=$(cat "$pidfile")
      engine() { [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; }   # the number may be another's by now
      if engine; then kill "$pid" || true; fi
      for _ in $(seq 100); do engine || break; sleep 0.1; done
      rm -f "$pidfile" "$socket"
    fi
    ;;
  *) echo "usage: docker.sh up [FILE]|down" >&2; exit 2 ;;
esac
