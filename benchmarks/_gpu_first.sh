set -uo pipefail
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1
python3 -m pip install -q --no-deps --no-build-isolation --no-cache-dir --upgrade --target /tmp/site . 2>&1 | tail -3
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 -c "
import rich, packaging, importlib.metadata as m; print('rich', m.version('rich'), [e.value for e in m.entry_points(group='sglang.srt.plugins')])"
python3 - <<'P'
import torch
for mb in (31, 33, 100, 567):
    ts=[torch.empty(mb<<20,dtype=torch.uint8,device='cuda') for _ in range(8)]
    p=[t.data_ptr() for t in ts]
    print(mb,'MB gaps MB', [round((b-a)/2**20-mb,1) for a,b in zip(p,p[1:])], hex(p[0]))
P
time python3 -c "
from g4debug.cpu.models import E4B_256, write
print(write(E4B_256, '/dev/shm/g4debug-e4b256', device='cuda'))"
ls -la /dev/shm/g4debug-e4b256/*; df -h /dev/shm | tail -1
time timeout 420 python3 repro/e4b_trtllm_mtp.py --device cuda --keep 2>&1 | tee $OUT/repro.txt | cut -c1-300 | tail -90
cp /tmp/g4debug-repro-*/*.log $OUT/ 2>/dev/null; cp /tmp/g4debug/*.pt $OUT/ 2>/dev/null; ls $OUT
