# What every process of the cluster needs in its environment: Ray on each node, `serve`, drivers, agents.
# Sourced by cluster.yaml's commands and by ~/.bashrc of the nodes; rayservice.yaml has the same values.
export PATH="$HOME/.flide/bin:$PATH"
# One token for all nodes, in ~/.ray/auth_token: whatever reaches a replica's port is unpickled.
export RAY_AUTH_MODE=token
# HTTP goes from HAProxy straight to a Gateway; calls between deployments are gRPC.
export RAY_SERVE_ENABLE_HA_PROXY=1
export RAY_SERVE_USE_GRPC_BY_DEFAULT=1
# A Gateway that dies costs one more try on another. Decisions change nothing, so asking twice is safe.
export RAY_SERVE_HAPROXY_RETRY_ON="conn-failure empty-response"
# HAProxy can only ask again what it still has in its buffer: bodies up to this many bytes.
export RAY_SERVE_HAPROXY_TUNE_BUFSIZE=1048576
# HAProxy that died is started anew after three of these, in seconds; Ray's own are 10.
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1
export RAY_USAGE_STATS_ENABLED=0
# Each connection is a file; as many as this machine lets a user have.
ulimit -n "$(ulimit -Hn)"
