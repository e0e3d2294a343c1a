#!/bin/sh
# CONFIG.yml key=value ...  trains; -m MODULE ... runs another module of the image, such as trainer.tools.preflight.
# exec: the program itself receives SIGTERM, and its exit code is the container's.
if [ "${1:-}" = "-m" ]; then
  exec python "$@"
fi
exec python -m trainer "$@"
