"""Prints a function for each symbol that PyTorch's CUDA build needs and runtime.cpp lacks. It
reports the call and refuses it. symbols.txt has the symbols, from ``nm -D --undefined-only``."""

from __future__ import annotations

import re
from pathlib import Path

here = Path(__file__).parent
written = set(re.findall(r"^API [\w \*]+?\b(\w+)\(", (here / "runtime.cpp").read_text(), re.M))
for name in sorted(set((here / "symbols.txt").read_text().split()) - written):
    is_driver = name.startswith("cu") and not name.startswith("cuda")
    result = "CUresult" if is_driver else "cudaError_t"
    code = "CUDA_ERROR_NOT_SUPPORTED" if is_driver else "remember(cudaErrorNotSupported)"
    print(f'API {result} stub_{name}() __asm__("{name}");')
    print(f'API {result} stub_{name}() {{ fault("not simulated: {name}"); return {code}; }}')
