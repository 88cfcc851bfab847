#!/usr/bin/env bash
# Build, start everything, show the run's log, and end as the run did. All but the jobs stays up
# afterwards: `docker compose up run` trains again, `docker compose down` ends it.
#
#   ./up.sh [NODES]    the same variables as generate.sh, and RUN_CONFIG and RUN_NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

./generate.sh "${1:-${NODES:-3}}"
docker compose up --build --detach --remove-orphans
docker compose logs --follow --no-log-prefix run
code=$(docker wait "$(docker compose ps --all --quiet run)")
exit "$code"
