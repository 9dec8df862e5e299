"""Bytes and floating-point operations of one call: what the operator must move and compute at least.

Bytes are compulsory traffic: every input read once, every output written once, whatever an implementation
reads again, copies or allocates. A product-and-sum is two operations; exp, tanh, a root and a division are
one each. `element` is the bytes of an activation (4 or 2). Prefill of KDA is counted as a chunk form of 64
whatever the implementation does.
"""

from __future__ import annotations

FP32 = 4
CHUNK = 64
MX_BLOCK = 32


def kda_decode_bytes(requests: int, heads: int, k: int, v: int, element: int) -> int:
    """States read and written in fp32; q, k, v, o in activations; g and beta in fp32."""
    return kda_state_traffic(requests, heads, k, v) + requests * heads * (
        element * (2 * k + 2 * v) + FP32 * (k + 1)
    )


def kda_state_traffic(requests: int, heads: int, k: int, v: int) -> int:
    """Bytes of the fp32 states, once read and once written."""
    return 2 * requests * heads * k * v * FP32


def kda_decode_flops(requests: int, heads: int, k: int, v: int) -> int:
    """Decay 1, S k 2, the rank-one update 2, S q 2: seven an element of S."""
    return requests * heads * 7 * k * v


def kda_prefill_flops(tokens: int, heads: int, k: int, v: int) -> int:
    """T H (2 * 64 (3K + 2V) + 6 K V)."""
    return tokens * heads * (2 * CHUNK * (3 * k + 2 * v) + 6 * k * v)


def kda_prefill_bytes(tokens: int, heads: int, k: int, v: int, element: int) -> int:
    """The rows of q, k, v, o, g and beta; the state is written once."""
    rows = tokens * heads * (element * (2 * k + 2 * v) + FP32 * (k + 1))
    return rows + heads * k * v * FP32


def kda_gate_bytes(tokens: int, heads: int, k: int, element: int) -> int:
    """f [T, H K] and b [T, H] read, g and beta written in fp32."""
    return tokens * heads * (k + 1) * (element + FP32)


def kda_gate_flops(tokens: int, heads: int, k: int) -> int:
    """Shift, rate, sigmoid (negate, exp, add, divide) and bound."""
    return tokens * heads * k * 7


def conv_extend_bytes(tokens: int, channels: int, width: int, element: int) -> int:
    """x read, y and the last width - 1 rows written, the fp32 taps read."""
    return channels * (element * (2 * tokens + width - 1) + FP32 * width)


def conv_decode_bytes(requests: int, channels: int, width: int, element: int) -> int:
    """Per request a row read and written and a window read and written; the fp32 taps read."""
    return channels * (element * requests * (2 + 2 * (width - 1)) + FP32 * width)


def conv_flops(tokens: int, channels: int, width: int) -> int:
    """A product-and-sum a tap, then SiLU in five."""
    return tokens * channels * (2 * width + 5)


def rms_norm_bytes(tokens: int, width: int, element: int) -> int:
    return element * (2 * tokens + 1) * width


def rms_norm_flops(tokens: int, width: int) -> int:
    return tokens * width * 4


def gated_norm_bytes(tokens: int, heads: int, v: int, element: int) -> int:
    """o and gate read, the result written; the fp32 weight [V] read."""
    return element * 3 * tokens * heads * v + FP32 * v


def gated_norm_flops(tokens: int, heads: int, v: int) -> int:
    """RMSNorm in four, sigmoid in four, their product."""
    return tokens * heads * v * 9


def mix_bytes(bank: int, tokens: int, width: int, element: int) -> int:
    """Bank rows and running sum read, the mix written, the fp32 key weight read."""
    return element * (bank + 2) * tokens * width + FP32 * width


def mix_flops(bank: int, tokens: int, width: int) -> int:
    """Per row read: square sum 2, score 2, weighted sum 2."""
    return (bank + 1) * tokens * width * 6


def block_prepare_bytes(bank: int, tokens: int, width: int, mixes: int, element: int) -> int:
    """Bank read; M fp32 sums with their maximum and total written; M fp32 key weights read."""
    return element * bank * tokens * width + FP32 * mixes * (tokens * (width + 2) + width)


def block_prepare_flops(bank: int, tokens: int, width: int, mixes: int) -> int:
    """Per bank row: square sum 2, and for each mix score 2 and weighted sum 2."""
    return bank * tokens * width * (2 + 4 * mixes)


def merge_bytes(tokens: int, width: int, element: int) -> int:
    """Running sum read, fp32 sums with maximum and total read, the mix written, the fp32 key weight read."""
    return element * 2 * tokens * width + FP32 * (tokens * (width + 2) + width)


def merge_flops(tokens: int, width: int) -> int:
    """Square sum 2, score 2, the merge of two weighted rows 3, division 1."""
    return tokens * width * 8


def activation_bytes(tokens: int, inner: int, element: int) -> int:
    return element * 3 * tokens * inner


def activation_flops(tokens: int, inner: int) -> int:
    """SiTU: two clipped tanh of three, sigmoid in four, two products."""
    return tokens * inner * 12


def output_gate_bytes(tokens: int, width: int, element: int) -> int:
    return element * 3 * tokens * width


def output_gate_flops(tokens: int, width: int) -> int:
    return tokens * width * 5


def mla_bytes(
    requests: int, prefix: int, new: int, heads: int, latent: int, rope: int, element: int, table: int = 4
) -> int:
    """Each request's cache rows and their table entries read once; queries read, outputs written."""
    rows = requests * (prefix + new) * ((latent + rope) * element + table)
    return rows + requests * new * heads * element * (2 * latent + rope)


def mla_flops(requests: int, prefix: int, new: int, heads: int, latent: int, rope: int) -> int:
    """For each pair of a new row and a position it sees: scores over latent + rope, sums over latent."""
    pairs = requests * (new * prefix + new * (new + 1) // 2)
    return pairs * heads * 2 * (2 * latent + rope)


def route_bytes(tokens: int, experts: int, top_k: int) -> int:
    """fp32 logits and bias read; fp32 weights and int64 ids written."""
    return FP32 * (tokens + 1) * experts + (FP32 + 8) * tokens * top_k


def route_flops(tokens: int, experts: int) -> int:
    """Sigmoid in four and the bias; comparisons are not counted."""
    return tokens * experts * 5


def linear_bytes(rows: int, inputs: int, outputs: int, element: int, heads: int = 1) -> int:
    return element * heads * (inputs * outputs + rows * (inputs + outputs))


def linear_flops(rows: int, inputs: int, outputs: int, heads: int = 1) -> int:
    return 2 * heads * rows * inputs * outputs


def mxfp4_weight_bytes(rows: int, columns: int) -> int:
    """Half a byte an element and one scale byte for each block of 32 columns."""
    return rows * columns // 2 + rows * columns // MX_BLOCK


def experts_bytes(touched: int, tokens: int, top_k: int, width: int, inner: int, element: int) -> int:
    """The three packed matrices of every expert touched, rows in and out, ids (int64) and fp32 weights."""
    matrices = touched * (2 * mxfp4_weight_bytes(inner, width) + mxfp4_weight_bytes(width, inner))
    return matrices + tokens * (2 * width * element + top_k * (8 + FP32))


def experts_flops(tokens: int, top_k: int, width: int, inner: int) -> int:
    """Three products for each pair of a token and an expert."""
    return tokens * top_k * 3 * 2 * width * inner


def kda_verify_bytes(requests: int, rows: int, heads: int, k: int, v: int, element: int) -> int:
    """States read; q, k, v, g, beta of the drafts read, o written; records of u, g (fp32) and k written."""
    drafts = requests * rows * heads
    inputs = element * (2 * k + 2 * v) + FP32 * (k + 1)
    return kda_state_traffic(requests, heads, k, v) // 2 + drafts * (inputs + FP32 * (v + k) + element * k)


def kda_verify_flops(requests: int, rows: int, heads: int, k: int, v: int) -> int:
    """Each draft costs what a decoded token costs."""
    return kda_decode_flops(requests * rows, heads, k, v)


def kda_commit_bytes(requests: int, tokens: int, heads: int, k: int, v: int, element: int) -> int:
    """States read and written; the records of `tokens` accepted drafts read."""
    records = requests * tokens * heads * (FP32 * (v + k) + element * k)
    return kda_state_traffic(requests, heads, k, v) + records


def kda_commit_flops(requests: int, tokens: int, heads: int, k: int, v: int) -> int:
    """Decay 1 and the rank-one update 2: three an element of S and token."""
    return requests * tokens * heads * 3 * k * v


def conv_verify_bytes(requests: int, rows: int, channels: int, width: int, element: int) -> int:
    """Windows and rows read, outputs and records written; the fp32 taps read."""
    return channels * (element * requests * (width - 1 + 3 * rows) + FP32 * width)


def conv_commit_bytes(requests: int, channels: int, width: int, element: int) -> int:
    """The last width - 1 rows of window and records read, the window written."""
    return channels * element * requests * 2 * (width - 1)


def block_attention_bytes(
    requests: int, context: int, rows: int, heads: int, groups: int, width: int, element: int, table: int = 4
) -> int:
    """Each request's keys, values and table entries read once; queries and own rows read, outputs written."""
    cached = requests * context * (2 * groups * width * element + table)
    return cached + requests * rows * width * element * (2 * heads + 2 * groups)


def block_attention_flops(requests: int, context: int, rows: int, heads: int, width: int) -> int:
    """Scores and sums for each pair of a drafted row and a position, its block's included."""
    return requests * rows * (context + rows) * heads * 4 * width
