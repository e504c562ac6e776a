#!/usr/bin/env bash
# Join hosts by an encrypted network (WireGuard), in which every host reaches every other one:
#     bash launch/tunnel.sh up root@203.0.113.10 root@198.51.100.20          # from any machine that reaches them by ssh
#     bash launch/tunnel.sh down root@203.0.113.10 root@198.51.100.20
# The first host gets the address 10.98.0.1, the second 10.98.0.2, and so on; `up` prints how to start a run on them. Each host
# needs WireGuard (Debian and Ubuntu: apt install wireguard-tools, and wireguard-go if the kernel has no WireGuard), root by
# ssh or sudo without a password, and its UDP port 51820 open to the others. user@HOST=ADDRESS gives the address at which the
# other hosts reach a host, if this is not HOST. With an empty address (user@HOST=), the other hosts do not try to reach the host
# but wait for its packets, as they must if it is behind NAT. Private keys are created on the hosts and never leave them. The
# network stays until `down` or a reboot.
# Variables: TUNNEL_NET (10.98.0), TUNNEL_PORT (51820), TUNNEL_WAIT (20 seconds for the hosts to hear from each other) and
# TUNNEL_MTU (1380 bytes per packet; WireGuard's default follows the host's MTU, up to 8921, and the internet drops such packets).
set -euo pipefail

net=${TUNNEL_NET:-10.98.0} port=${TUNNEL_PORT:-51820} mtu=${TUNNEL_MTU:-1380} wait_seconds=${TUNNEL_WAIT:-20}
card=wg-llmtrain # the run does not warn of missing encryption on interfaces whose names begin with wg

action=${1:-} && shift || true
case "$action" in up) least=2 ;; down) least=1 ;; *) least=$(($# + 1)) ;; esac
if [ "$#" -lt "$least" ] || [ "$#" -gt 254 ]; then
  echo "error: bash launch/tunnel.sh up|down [USER@]HOST[=ADDRESS] ... with 2 to 254 hosts; see the top of the file" >&2
  exit 2
fi

hosts=("$@")

# Quote a text for any shell: printf %q may write $'...', which dash and fish do not understand.
quote() { printf "'%s'" "$(sed "s/'/'\\\\''/g" <<< "$1")"; }

# Run the bash script $2 on the host $1 as root. Further words are the script's arguments, from its $1 on. The script reads this
# function's standard input.
on() {
  local host=${1%%=*} program=$2
  shift 2
  local words
  words=$(quote "$program") && words+=$(printf ' %q' tunnel "$@")
  words="if [ \"\$(id -u)\" = 0 ]; then exec bash -c $words; else exec sudo -n bash -c $words; fi"
  # shellcheck disable=SC2029
  ssh -o BatchMode=yes -o ConnectTimeout=15 "$host" "bash -c $(quote "$words")" ||
    { echo "error: $host: ${FUNCNAME[1]//_/ } failed, see the line above" >&2 && exit 1; }
}

public_key() {
  on "$1" '
    command -v wg wg-quick > /dev/null || { echo "WireGuard is not installed (wireguard-tools)" >&2; exit 1; }
    umask 077 && mkdir -p /etc/wireguard && cd /etc/wireguard
    [ -s "$1.key" ] || wg genkey > "$1.key"
    wg pubkey < "$1.key"' "$card" < /dev/null
}

start_network() {
  on "$1" '
    umask 077 && cat > "/etc/wireguard/$1.conf"
    ip link show "$1" > /dev/null 2>&1 && wg-quick down "$1" > /dev/null 2>&1
    said=$(wg-quick up "$1" 2>&1) || { echo "$said" >&2; exit 1; }' "$card"
}

stop_network() {
  on "$1" 'wg-quick down "$1" > /dev/null 2>&1; rm -f "/etc/wireguard/$1.conf" "/etc/wireguard/$1.key"' "$card" < /dev/null
}

# Wait until a host has heard from all peers, for at most $wait_seconds. Print the numbers of the peers from which it has not.
unheard() {
  on "$1" '
    for _ in $(seq "$2"); do
      late=$(wg show "$1" latest-handshakes | while read -r key seconds; do [ "$seconds" != 0 ] || echo "$key"; done)
      [ -n "$late" ] || exit 0
      sleep 1
    done
    wg show "$1" allowed-ips | grep -F "$late" | sed "s/.*[.]//; s,/32,,"' "$card" "$wait_seconds" < /dev/null
}

# Print the address at which other hosts reach a host, or an empty line if they can't reach it.
endpoint() {
  local address=${1##*@}
  case "$1" in *=*) address=${1#*=} ;; esac
  echo "$address"
}

if [ "$action" = down ]; then
  failed=0
  for host in "${hosts[@]}"; do (stop_network "$host") || failed=1; done
  exit "$failed"
fi

keys=()
for host in "${hosts[@]}"; do
  key=$(public_key "$host")
  keys+=("$key")
done

for mine in "${!hosts[@]}"; do
  {
    printf '[Interface]\nAddress = %s.%d/24\nListenPort = %s\nMTU = %s\n' "$net" $((mine + 1)) "$port" "$mtu"
    printf 'PostUp = wg set %%i private-key /etc/wireguard/%s.key\n' "$card"
    for other in "${!hosts[@]}"; do
      [ "$other" != "$mine" ] || continue
      printf '\n[Peer]\nPublicKey = %s\nAllowedIPs = %s.%d/32\n' "${keys[other]}" "$net" $((other + 1))
      address=$(endpoint "${hosts[other]}")
      [ -z "$address" ] || printf 'Endpoint = %s:%s\n' "$address" "$port"
      printf 'PersistentKeepalive = 25\n' # keeps a firewall or NAT open for answers, and makes every peer be heard from
    done
  } | start_network "${hosts[mine]}"
done

failed=0
for mine in "${!hosts[@]}"; do
  late=$(unheard "${hosts[mine]}")
  for number in $late; do
    other=$((number - 1)) failed=1
    echo "error: ${hosts[mine]} hears nothing from ${hosts[other]}; open UDP port $port between them, in both directions" >&2
  done
done
[ "$failed" = 0 ] || exit 1

echo "joined over $card: start node K (from 0) on the host with the address $net.(K+1), for example"
for mine in "${!hosts[@]}"; do
  echo "  on ${hosts[mine]%%=*}: NNODES=${#hosts[@]} NODE_RANK=$mine MASTER_ADDR=$net.1 bash launch/train.sh RECIPE parallel.replica_network=$card parallel.replica_backend=gloo"
done
