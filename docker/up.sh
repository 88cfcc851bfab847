#!/usr/bin/env bash
# Build, start everything, show the run's log, and end as the run did. All but the jobs stays up
# afterwards: `docker compose up run` trains again, `docker compose down` ends it.
#
#   ./up.sh [NODES]    the same variables as generate.sh, and RUN_CONFIG and RUN_NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

missing() {
  echo "make docker-up: $1" >&2
  exit 1
}
command -v docker >/dev/null \
  || missing "docker is not installed (or not on PATH); it needs Docker with the compose plugin."
docker compose version >/dev/null 2>&1 \
  || missing "docker has no compose plugin; install it (the package docker-compose-plugin)."
if ! reason=$(docker info 2>&1 >/dev/null); then
  missing "no Docker engine answers; start it or check DOCKER_HOST and your permissions ($(tr '\n' ' ' <<<"$reason"))."
fi

./generate.sh "${1:-${NODES:-3}}"
docker compose up --build --detach --remove-orphans
docker compose logs --follow --no-log-prefix run
code=$(docker wait "$(docker compose ps --all --quiet run)")
exit "$code"
