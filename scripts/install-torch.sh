#!/bin/sh
# scripts/install-torch.sh VENV: torch for the CPU, by which the tests of its operators run without a GPU: 190 MB to fetch,
# 0.7 GB on disk, half a minute. PyPI's own wheel is for CUDA and brings gigabytes. Ends well where there is none to be had:
# those tests then say that torch is missing.
set -u
venv=$1
version=2.13.0
"$venv/bin/python" -c 'import torch' 2>/dev/null && exit 0
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --timeout 20 --retries 0 \
  --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" && exit 0
echo "install-torch: torch $version for the CPU can't be had here; tests of torch are skipped" >&2
exit 0
