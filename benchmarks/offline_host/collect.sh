#!/usr/bin/env bash
# bash benchmarks/offline_host/collect.sh OUT TO SECONDS: waits until the queue that begin.sh began has ended, at
# most SECONDS, and packs into the folder TO what is in OUT: logs.tgz (logs and results), history.tgz (what history
# suites left, without large files) and soaks.tgz (logs, dumps and tapes of soaks). Prints each log's last words.
set -u
out=$1 to=$2 end=$((SECONDS + $3))
while [ $SECONDS -lt $end ] && pgrep -f benchmarks/gpu_queue.py > /dev/null; do sleep 2; done
cd "$out" || exit 1
cat queue.out
tar czf "$to/logs.tgz" --exclude=./tmp --exclude=./results/history* . 2> /dev/null
find results/history* -type f -size -700k 2> /dev/null | tar czf "$to/history.tgz" -T -
find tmp -path '*g4debug-soak*' -type f -size -3000k 2> /dev/null | tar czf "$to/soaks.tgz" -T -
ls -l "$to"
for log in *.log; do echo "== $log: $(tail -c 200 "$log" | tr '\n' ' ')"; done
