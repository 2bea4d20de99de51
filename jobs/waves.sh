#!/usr/bin/env bash
# Drive waves on this machine's GPUs, each as a run of its own, and merge them into one run.
#
#   jobs/waves.sh RUNS [WAVE]...     default: all six waves
#
# The runs are RUNS/wave-N and RUNS/whole. ENGINES is the number of engines per stack (default 2). With KEEP=FOLDER each run is
# packed into FOLDER as soon as it has ended. The exit status is that of the merge: 2 if a wave broke off.
set -euo pipefail
runs=${1:?usage: jobs/waves.sh RUNS [WAVE]...}
shift
[ $# -gt 0 ] || set -- 1 2 3 4 5 6

# The stacks start a Ray of their own on 127.0.0.1. Inside a Ray job these variables would make them join its cluster.
unset RAY_ADDRESS RAY_JOB_CONFIG_JSON_ENV_VAR RAY_RUNTIME_ENV_HOOK

# One archive per run: storage that keeps objects takes whole files only.
keep() {
    [ -n "${KEEP:-}" ] && [ -d "$runs/$1" ] || return 0
    mkdir -p "$KEEP"
    tar --create --gzip --exclude=policies --file "$KEEP/$1.tar.gz" --directory "$runs" "$1"
}

shards=()
for wave; do
    parity run --wave "$wave" --everything --engine cuda --engines "${ENGINES:-2}" --run-dir "$runs/wave-$wave" ||
        echo "wave $wave ended with exit status $?" >&2 # red, or broken off: the merge tells which
    keep "wave-$wave"
    shards+=("$runs/wave-$wave")
done

status=0
parity report --merge "${shards[@]}" --run-dir "$runs/whole" || status=$?
keep whole
exit "$status"
