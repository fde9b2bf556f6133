"""What the memory of large results costs: the same calls under settings of the allocator, one process for each.

glibc gives every allocation above 32 MiB back to the system when it is freed, and the next one is faulted in page by
page. A library must not change that for its user; the settings are of the environment. Times are of one machine, in
turn; compare along a row.

    python benchmarks/page_faults.py [--tokens 2048] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

SETTINGS: dict[str, dict[str, str]] = {
    "nothing set": {},
    "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
    },
}


def measure(tokens: int, dtype_name: str) -> dict[str, float]:
    """Milliseconds of a call, the least of several: a clone of q and k, transformers' rotation, and ours."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from theodolite import Rotary, rotary_tables
    from theodolite.kernels import rotate

    torch.set_grad_enabled(False)
    dtype = getattr(torch, dtype_name)
    q, k = (torch.randn(1, tokens, heads, 128).to(dtype).transpose(1, 2) for heads in (32, 8))
    cos, sin = rotary_tables(Rotary(head_dim=128, rope_theta=10000.0), torch.arange(tokens))
    wide = [torch.cat((table, table), dim=-1)[None].to(dtype) for table in (cos, sin)]
    ways: dict[str, Callable[[], object]] = {
        "clone": lambda: (q.clone(), k.clone()),
        "transformers": lambda: apply_rotary_pos_emb(q, k, *wide),
        "new": lambda: rotate(q, k, cos, sin),
        "in place": lambda: rotate(q, k, cos, sin, inplace=True),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(15):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.tokens, options.dtype)))
        return
    print(f"{'milliseconds':56}" + "".join(f"{name:>14}" for name in ("clone", "transformers", "new", "in place")))
    for name, setting in SETTINGS.items():
        command = [sys.executable, __file__, "--one", "--tokens", str(options.tokens), "--dtype", options.dtype]
        done = subprocess.run(command, env=os.environ | setting, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{name:56}" + "".join(f"{value:14.1f}" for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
