"""Settings of every test process: small, quiet, in one process, before vLLM is imported."""

from __future__ import annotations

import os

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",  # tiny models: threads cost more than they give, and waiting threads stall a busy machine
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)
