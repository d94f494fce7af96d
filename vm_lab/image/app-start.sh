#!/bin/sh
# Starts the demo server: nginx reads no environment, so its configuration is made from it.
#   PORT            where to listen, 8080 if unset
#   TWINE_MACHINE   shown on the page; the host's name if unset
#   TWINE_TASK      shown on the page
# Writes below /tmp only: the root file system is read-only.
set -eu

clean() { # nothing that could end the string it is put into
    printf %s "$1" | tr -cd 'A-Za-z0-9._/:@-'
}

dir=/tmp/nginx
mkdir -p "$dir"
rm -f "$dir/access"
mkfifo "$dir/access"
sed -e "s|@PORT@|$(clean "${PORT:-8080}")|" \
    -e "s|@VERSION@|$(cat /etc/demo-version)|" \
    -e "s|@MACHINE@|$(clean "${TWINE_MACHINE:-$(hostname)}")|" \
    -e "s|@TASK@|$(clean "${TWINE_TASK:-none}")|" \
    /etc/nginx/nginx.conf >"$dir/nginx.conf"

# The journal's socket cannot be opened by path as /dev/stdout, so the log comes by a FIFO;
# its reader ends with nginx.
cat "$dir/access" &
exec nginx -e stderr -c "$dir/nginx.conf"
