set -uo pipefail
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1
python3 -m pip install -q --no-deps --no-build-isolation --no-cache-dir --upgrade --target /tmp/site . 2>&1 | tail -3
time timeout 330 python3 repro/e4b_trtllm_mtp.py --device cuda --keep 2>&1 | tee $OUT/repro.txt | cut -c1-400 | tail -70
cp /tmp/g4debug-repro-*/*.log $OUT/ 2>/dev/null; cp /tmp/g4debug/*.pt $OUT/ 2>/dev/null; ls $OUT
time timeout 200 python3 -m pytest -x -p no:cacheprovider tests/gpu/test_engine_replay.py 2>&1 | tail -40 | cut -c1-300
