#!/usr/bin/env bash
# bash benchmarks/offline_host/begin.sh PARTS TARGET JOBS OUT SECONDS [MORE ...]
# On the GPU host, in the clone: puts PARTS (pack.py's) together in TARGET, if it is not there yet, lets SGLang
# find g4debug there and in MORE (folders of other releases), and begins with JOBS (see gpu_queue.py) in a session
# of its own, so that they go on when this shell ends. A GPU has five shares. If a server would run without g4debug,
# nothing is begun: its exit code is 1.
set -euo pipefail
parts=$1 target=$2 jobs=$3 out=$4 seconds=$5; shift 5
here=$(cd "$(dirname "$0")/../.." && pwd)
[ -e "$target/env.sh" ] || bash "$here/benchmarks/offline_host/unpack.sh" "$parts" "$target"
mkdir -p "$out"
python3 "$here/benchmarks/offline_host/register.py" "$target" "$@"
. "$target/env.sh"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
python3 - <<'EOF'
import importlib.metadata, sys
import sglang, torch
import g4debug
found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="g4debug")
print("SGLang", sglang.__version__, "torch", torch.__version__, "g4debug", g4debug.__file__)
sys.exit(0 if found else "SGLang finds no plugin g4debug here, so that nothing would be armed")
EOF
export RESULTS="$out/results"; mkdir -p "$RESULTS"
cd "$here"
setsid nohup python3 benchmarks/gpu_queue.py "$jobs" --seconds "$seconds" --out "$out" --shares 5 \
  > "$out/queue.out" 2>&1 < /dev/null &
sleep 5
# A queue that ends at once has a reason that should be read now.
cat "$out/queue.out"; tail -n 3 "$out"/*.log 2> /dev/null || true
