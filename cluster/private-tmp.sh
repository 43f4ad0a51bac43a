# Source this before `ray start`, with RAY_TMPDIR set. Sockets and files of Ray and HAProxy then go into that folder, which
# only this user can enter: Ray opens its own folder to all users, and HAProxy's socket gives control of HAProxy.
umask 077
mkdir -p "$RAY_TMPDIR/ha" && chmod 700 "$RAY_TMPDIR" || exit
export RAY_TMPDIR
export RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=$RAY_TMPDIR/ha/haproxy.cfg
export RAY_SERVE_HAPROXY_SOCKET_PATH=$RAY_TMPDIR/ha/admin.sock
export RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH=$RAY_TMPDIR/ha/metrics.sock
export RAY_SERVE_HAPROXY_SERVER_STATE_BASE=$RAY_TMPDIR/ha
export RAY_SERVE_HAPROXY_SERVER_STATE_FILE=$RAY_TMPDIR/ha/server-state
