"""The shipped specs, by what they are made of; programs, of several kernels or of views, stand apart."""

from __future__ import annotations

from pathlib import Path

from fusegen.language.axes import over_rows
from fusegen.language.spec import Chain, load_chains
from fusegen.planner.attention.recognition import has_plain_weights, is_attention
from fusegen.planner.attention.written import is_written
from fusegen.planner.products.factors import lacking
from fusegen.targets import Target

FOLDER = Path(__file__).resolve().parent.parent / "specs"
SHIPPED = {chain.name: chain for chain in load_chains(FOLDER)}
CUT = (
    "decode_attention", "decoder_layer", "decoder_layer_prefill", "fp8_norm_swiglu_quant", "groupnorm_silu",
    "kv8_attention", "layernorm_backward", "linear_cross_entropy", "logits_argmax", "lora", "mla_decode", "mlp",
    "moe_layer", "moe_mlp", "moe_routing", "o_proj_residual_rmsnorm", "paged_attention", "rmsnorm_backward",
)  # fmt: skip
VIEWED = {name: chain for name, chain in SHIPPED.items() if chain.graph.viewed and name not in CUT}  # a kernel each
PROGRAMS = {**{name: SHIPPED[name] for name in CUT}, **VIEWED}
# whose rows are whole groups, at most a warp's: tests of group limits are for them
LIMITED = {name: c for name, c in SHIPPED.items() if c.graph.selection is not None and c.graph.selection.limit}
# one kernel each
ALL = {name: chain for name, chain in SHIPPED.items() if name not in PROGRAMS and name not in LIMITED}
# sizes at which a chain of many products is soon run, and small enough that errors leave something to be judged
FEW = {
    "decode_attention": {"B": 2, "G": 2, "R": 2, "T": 8200, "D": 16},
    "decoder_layer": {"B": 2, "D": 64, "H": 2, "G": 2, "E": 16, "T": 32, "U": 96},
    "grouped_fp8_block_gemm": {"T": 40, "N": 256, "K": 384, "E": 3},
    "grouped_mxfp4": {"T": 40, "N": 96, "K": 128, "E": 4},
    "lightning_indexer": {"S": 24, "T": 150, "H": 16, "D": 64},
    "kv8_attention": {"B": 2, "G": 2, "R": 2, "T": 2100, "D": 32},
    "mla_decode": {"B": 2, "H": 20, "T": 2100, "D": 288, "E": 256},
    "moe_layer": {"T": 9, "D": 64, "H": 64, "E": 8},
    "moe_mlp": {"T": 40, "H": 96, "K": 64, "E": 4},
    "moe_routing": {"T": 40, "D": 512, "E": 24},
    "paged_attention": {"B": 2, "G": 2, "R": 2, "N": 40, "P": 520, "L": 16, "D": 16},
    "decoder_layer_prefill": {"S": 40, "D": 64, "H": 2, "G": 2, "E": 16, "V": 64, "U": 96},
}
ATTENTION = {name: c for name, c in ALL.items() if is_attention(c.graph) or has_plain_weights(c.graph)}
WRITTEN = {name: chain for name, chain in ALL.items() if is_written(chain.graph)}
PRODUCTS = {name: c for name, c in ALL.items() if c.graph.products and name not in (*ATTENTION, *WRITTEN)}
COLUMNS = {name: chain for name, chain in ALL.items() if over_rows(chain.graph)}
ROWS = {name: chain for name, chain in ALL.items() if not chain.graph.products and name not in COLUMNS}


def planned(chain: Chain, target: Target) -> bool:
    """Has it a plan there? OCP's 8-bit floats are multiplied by no unit of some GPUs."""
    return not lacking(chain.graph, target)


def storage_types(chain: Chain) -> tuple[str, ...]:
    """What its arrays may be stored as: products take no f32 unless they ask for tf32."""
    asks = {node.op.name for node in chain.graph.products} - {"matmul_tf32"}
    return ("f16", "bf16") if asks else ("f16", "bf16", "f32")
