"""fusegen: fused GPU kernels from small Python op graphs; see README.md."""

from fusegen import ops
from fusegen.spec import Chain, chain
from fusegen.types import Dim, DType, b8, bf16, dims, f16, f32, i32

__version__ = "0.1.0"
__all__ = ["Chain", "DType", "Dim", "b8", "bf16", "chain", "dims", "f16", "f32", "i32", "ops"]
