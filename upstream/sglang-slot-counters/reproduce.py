"""No metric tells acceptance by position of a block. Exit code 1: none does; 0: one does.

Needs the sglang wheel, no GPU, no network.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

(root,) = find_spec("sglang").submodule_search_locations
source = "".join(file.read_text() for file in sorted((Path(root) / "srt/observability").rglob("*.py")))
found = sorted(set(re.findall(r"sglang:spec_\w+", source)))
assert "sglang:spec_accept_length" in found, "the metrics have moved"
print("metrics of speculation:", *found)
by_position = [name for name in found if re.search(r"per_pos|_position|_slot|by_pos", name)]
if by_position:
    print("mended:", *by_position)
    sys.exit(0)
print("fault: no metric tells which positions of a block are accepted")
sys.exit(1)
