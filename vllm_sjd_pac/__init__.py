"""SJD-PAC for vLLM: lossless speculative Jacobi decoding for image-token models (arXiv 2603.18599).

Importing this package is cheap: neither torch nor vLLM is imported here.
"""

from vllm_sjd_pac.config import SJDPACConfig

__all__ = ["SJDPACConfig", "__version__"]
__version__ = "0.1.0"
