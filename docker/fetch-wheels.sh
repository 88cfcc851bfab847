#!/usr/bin/env bash
# Fill wheels/ with everything the image needs, for builds without a package index:
#
#   ./fetch-wheels.sh && PIP_NO_INDEX=1 ./up.sh
#
# A CPU wheel of torch that already lies in wheels/ is kept instead of the build with CUDA.
# PIP_INDEX_URL and PIP_EXTRA_INDEX_URL are handed on to pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

docker run --rm --env PIP_INDEX_URL --env PIP_EXTRA_INDEX_URL \
  --volume "$PWD/wheels:/wheels" --volume "$PWD/requirements.txt:/requirements.txt:ro" \
  "${BASE_IMAGE:-python:3.11-slim-bookworm}" \
  pip download --no-cache-dir --find-links /wheels --dest /wheels --requirement /requirements.txt
