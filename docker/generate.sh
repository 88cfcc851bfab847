#!/usr/bin/env bash
# Write the compose file of the nodes, and .env, which tells `docker compose` about it.
#
#   ./generate.sh 5                     five nodes
#   GPU=1 ./generate.sh 2               nodes with the host's NVIDIA GPUs
#   WHEELS_DIR=/mnt/wheels ./generate.sh 3
#   FLOWER=1.41.0 ./generate.sh 3       another Flower than the pinned one: compose.http.yaml
#
# Also taken over into .env if set: BASE_IMAGE, IMAGE, RUNS_DIR, TLS_NAMES, APP_UID, APP_GID and
# FEDPSA_NODE_WARM.
# By default the containers run as the caller, so that the results are the caller's; as 10001 if
# that is root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

nodes=${1:-${NODES:-3}}
if ! [[ $nodes =~ ^[1-9][0-9]{0,2}$ ]]; then
  echo "The number of nodes must be between 1 and 999, not '$nodes'." >&2
  exit 2
fi
runs_dir=${RUNS_DIR:-./runs}
uid=${APP_UID:-$(id -u)}
gid=${APP_GID:-$(id -g)}
if [[ $uid == 0 ]]; then
  uid=10001
  gid=10001
fi
pattern=compose.node.yaml
if [[ -n ${GPU:-} && ${GPU} != 0 ]]; then
  pattern=compose.gpu.yaml
fi

write_nodes() {
  local i
  echo "# Written by generate.sh for $nodes nodes; do not edit."
  echo "services:"
  echo "  register:"
  echo "    depends_on:"
  for ((i = 1; i <= nodes; i++)); do
    echo "      node-$i-setup:"
    echo "        condition: service_completed_successfully"
  done
  echo "    volumes:"
  for ((i = 1; i <= nodes; i++)); do
    echo "      - node-$i-public:/public/node-$i:ro"
  done
  for ((i = 1; i <= nodes; i++)); do
    cat <<EOF

  node-$i-setup:
    extends:
      file: $pattern
      service: setup
    environment: &node-$i
      PARTITION_ID: "$((i - 1))"
      NUM_PARTITIONS: "$nodes"
    volumes:
      - node-$i-key:/key
      - node-$i-public:/public
      - node-$i-data:/data
  node-$i:
    extends:
      file: $pattern
      service: supernode
    environment: *node-$i
    volumes:
      - trust:/trust:ro
      - node-$i-key:/key:ro
      - node-$i-data:/data:ro
    depends_on:
      register:
        condition: service_completed_successfully
EOF
  done
  echo
  echo "volumes:"
  for ((i = 1; i <= nodes; i++)); do
    printf '  node-%d-key:\n  node-%d-public:\n  node-%d-data:\n' "$i" "$i" "$i"
  done
}

write_env() {
  local name files=compose.yaml:compose.nodes.yaml
  if [[ -n ${WHEELS_DIR:-} ]]; then
    files+=:compose.wheels.yaml
  fi
  if [[ -n ${FLOWER:-} ]]; then
    files+=:compose.http.yaml
  fi
  echo "# Written by generate.sh; what the shell's environment says goes before it."
  echo "COMPOSE_PATH_SEPARATOR=:"
  echo "COMPOSE_FILE=$files"
  echo "NODES=$nodes"
  echo "APP_UID=$uid"
  echo "APP_GID=$gid"
  echo "RUNS_DIR='$runs_dir'"
  if [[ -n ${FLOWER:-} ]]; then
    echo "FLEET_PORT=8000"
  fi
  for name in BASE_IMAGE FEDPSA_NODE_WARM FLOWER IMAGE TLS_NAMES WHEELS_DIR; do
    if [[ -n ${!name:-} ]]; then
      echo "$name='${!name}'"
    fi
  done
}

write_nodes >compose.nodes.yaml
write_env >.env
# Docker would make this folder as root.
mkdir -p "$runs_dir"
if [[ $(id -u) == 0 ]]; then
  chown "$uid:$gid" "$runs_dir"
fi
echo "$nodes nodes (user $uid:$gid, results in $runs_dir): docker compose up --build"
