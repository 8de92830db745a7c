#!/bin/sh
# While it serves Blackwell MoE, FlashInfer links kernels into the folder `flashinfer` of its own package's cubins, which
# FLASHINFER_CUBIN_DIR cannot move (flashinfer #2976). Under a read-only root that folder has to lead to /tmp.
#
#   link_cubins.sh        as root: makes the link
#   link_cubins.sh probe  as the image's user: makes and removes a file as FlashInfer would
set -eu
cubins=$(python3 -c 'import flashinfer_cubin; print(flashinfer_cubin.get_cubin_dir())' 2> /dev/null || true)
[ -n "$cubins" ] || { echo "no flashinfer-cubin here: nothing to link"; exit 0; }
if [ "${1:-}" = probe ]; then
  mkdir -p "$cubins/flashinfer/trtllm/batched_gemm"
  ln -s "$cubins" "$cubins/flashinfer/trtllm/batched_gemm/trtllmGen_bmm_export"
  rm -r /tmp/trtllm
elif [ -d "$cubins/flashinfer" ] && [ ! -L "$cubins/flashinfer" ]; then
  echo "$cubins/flashinfer is part of this flashinfer-cubin: link_cubins.sh has to learn where it links kernels" >&2
  exit 1
else
  ln -sfn /tmp "$cubins/flashinfer"
fi
