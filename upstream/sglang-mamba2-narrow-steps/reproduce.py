"""Mamba2 states of a verify step narrower than their buffer go to other requests. Exit code 1: they do; 0: they do not.

Needs the sglang wheel, no GPU, no network. The kernels need a GPU: their row arithmetic is taken from their source.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

(root,) = find_spec("sglang").submodule_search_locations
mixer = ast.parse((Path(root) / "srt/layers/attention/mamba/mamba.py").read_text())
(told,) = [
    keyword.value
    for node in ast.walk(mixer)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "selective_state_update"
    for keyword in node.keywords
    if keyword.arg == "cache_steps"
]
writer = (Path(root) / "kernels/ops/mamba/triton_ops/mamba_ssm.py").read_text()
reader = (Path(root) / "kernels/ops/mamba/mamba_state_scatter_triton.py").read_text()
# The writer's row of a request is `cache_steps` slots long; the reader's is as long as the buffer's own.
assert "cache_idx * cache_steps * nheads * dim * dstate" in writer, "the kernel has another row arithmetic by now"
assert "stride(0)" in reader, "the scatter has another row arithmetic by now"

allocated, width = 8, 2  # slots that the buffer has for each request, and those of this step
buffer = torch.zeros(3, allocated, 1, 1, 1)  # [requests, slots, heads, dim, dstate]
names = {"draft_token_num": width, "layer_cache": SimpleNamespace(intermediate_ssm=buffer), "self": None}
cache_steps = eval(compile(ast.Expression(told), "mamba.py", "eval"), names)
for request in range(len(buffer)):
    for slot in range(width):  # what the writer stores: the number of the request, from 1
        buffer.view(-1)[request * cache_steps + slot] = request + 1
read = [buffer[request, :width].flatten().tolist() for request in range(len(buffer))]
print(
    f"rows of {allocated} slots, a step of {width}: cache_steps={cache_steps}; states read by requests 1, 2, 3: {read}"
)
if read == [[request + 1.0] * width for request in range(len(buffer))]:
    print("mended: every request reads its own states")
    sys.exit(0)
print("fault: all requests but the first take over states of others, or none")
sys.exit(1)
