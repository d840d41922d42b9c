#!/usr/bin/env bash
# bash unpack.sh FOLDER TARGET: what pack.py made, on the GPU host. TARGET/env.sh is for the server.
set -euo pipefail
folder=$1 target=$2
mkdir -p "$target"
cat "$folder"/part* | xz -T0 -dc | tar -C "$target" -xf -
nvidia=$(python3 -c "import nvidia; print(list(nvidia.__path__)[0])")
ln -sfn "$nvidia" "$target/nvidia"
python3 "$target/stub_symbols.py" "$target" "$nvidia" "$target/stub.so"
cat > "$target/env.sh" <<EOF
export PYTHONPATH=$target\${PYTHONPATH:+:\$PYTHONPATH} LD_PRELOAD=$target/stub.so
# FlashInfer's norms in CUDA: those in CUTLASS' Python language are not in these parts.
export FLASHINFER_USE_CUDA_NORM=1
EOF
du -sh "$target"
