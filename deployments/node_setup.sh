#!/usr/bin/env bash
# Installs the checkout this file is in on a node, into ~/.flide; safe to run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "Python 3.11 or newer is needed, found $(python3 --version)" >&2; exit 1; }
[ -x ~/.flide/bin/pip ] || python3 -m venv ~/.flide
~/.flide/bin/pip install --quiet --disable-pip-version-check --editable .
# `ray attach` and `ray exec` open login shells, whose `serve` must agree with the nodes
line=". $PWD/deployments/node.sh"
touch ~/.bashrc
grep -qxF "$line" ~/.bashrc || echo "$line" >>~/.bashrc
