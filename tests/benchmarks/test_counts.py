"""Bytes and operations against figures worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks import counts
from benchmarks.cases import Sizes, all_cases


def test_kda_decode_reads_and_writes_every_state_once():
    # 4 requests x 96 heads x 64 KiB, twice; q, k, v, o, g of 128 and beta, all fp32.
    assert counts.kda_state_traffic(4, 96, 128, 128) == 2 * 25_165_824
    assert counts.kda_decode_bytes(4, 96, 128, 128, 4) == 50_331_648 + 384 * 641 * 4
    assert counts.kda_decode_bytes(4, 96, 128, 128, 2) == 50_331_648 + 384 * (512 * 2 + 129 * 4)
    assert counts.kda_decode_flops(4, 96, 128, 128) == 384 * 7 * 16_384


def test_kda_prefill_is_counted_as_a_chunk_form_of_64():
    # 4,096 x 32 x (2 x 64 x 640 + 6 x 16,384) = 131,072 x 180,224
    assert counts.kda_prefill_flops(4096, 32, 128, 128) == 23_622_320_128
    assert counts.kda_prefill_flops(10, 3, 16, 8) == 10 * 3 * (2 * 64 * (48 + 16) + 6 * 128)
    assert counts.kda_prefill_bytes(2, 3, 16, 8, 4) == 6 * (48 + 17) * 4 + 3 * 128 * 4


def test_kda_gate_counts_decay_and_step():
    assert counts.kda_gate_bytes(5, 2, 16, 2) == 5 * 2 * 17 * (2 + 4)
    assert counts.kda_gate_flops(5, 2, 16) == 5 * 2 * 16 * 7


def test_short_conv_moves_rows_windows_and_taps():
    assert counts.conv_extend_bytes(10, 8, 4, 2) == 8 * (10 * 2 * 2 + 3 * 2 + 4 * 4)
    # Per channel and request: a row in, a row out, three window rows read and written.
    assert counts.conv_decode_bytes(4, 36_864, 4, 4) == 36_864 * (4 * 8 * 4 + 16)
    assert counts.conv_flops(4, 36_864, 4) == 4 * 36_864 * 13


def test_row_operators_count_each_row_once():
    assert counts.rms_norm_bytes(3, 10, 4) == 4 * (30 + 30 + 10)
    assert counts.rms_norm_flops(3, 10) == 120
    assert counts.gated_norm_bytes(3, 2, 8, 2) == 2 * 3 * 48 + 32
    assert counts.gated_norm_flops(3, 2, 8) == 48 * 9
    assert counts.activation_bytes(3, 10, 2) == 180
    assert counts.activation_flops(3, 10) == 360
    assert counts.output_gate_bytes(3, 10, 4) == 360
    assert counts.output_gate_flops(3, 10) == 150


def test_residual_mix_reads_the_bank_and_the_running_sum():
    assert counts.mix_bytes(8, 4, 7168, 4) == 4 * (10 * 4 * 7168) + 4 * 7168
    assert counts.mix_flops(8, 4, 7168) == 9 * 4 * 7168 * 6
    assert counts.block_prepare_bytes(8, 4, 10, 24, 4) == 8 * 4 * 10 * 4 + 24 * (4 * 12 + 10) * 4
    assert counts.block_prepare_flops(8, 4, 10, 24) == 8 * 4 * 10 * (2 + 96)
    assert counts.merge_bytes(4, 10, 2) == 2 * 40 * 2 + (4 * 12 + 10) * 4
    assert counts.merge_flops(4, 10) == 320


def test_latent_attention_reads_a_requests_cache_once_for_all_heads():
    # One new row after 3 cached: it sees 4. Two new rows after 3: 4 + 5 pairs.
    assert counts.mla_flops(1, 3, 1, 2, 8, 4) == 4 * 2 * 2 * 20
    assert counts.mla_flops(1, 3, 2, 2, 8, 4) == 9 * 2 * 2 * 20
    assert counts.mla_bytes(2, 3, 1, 5, 8, 4, 4) == 2 * 4 * (12 * 4 + 4) + 2 * 5 * 4 * (12 + 8)


def test_matrix_products_count_weights_and_rows():
    assert counts.linear_bytes(4, 7168, 896, 4) == 4 * (7168 * 896 + 4 * 8064)
    assert counts.linear_flops(4, 7168, 896) == 2 * 4 * 7168 * 896
    assert counts.linear_bytes(4, 128, 512, 2, heads=96) == 2 * 96 * (65_536 + 4 * 640)
    assert counts.linear_flops(4, 128, 512, heads=96) == 96 * 2 * 4 * 65_536
    assert counts.route_bytes(4, 896, 16) == 4 * 5 * 896 + 12 * 64
    assert counts.route_flops(4, 896) == 4 * 896 * 5


def test_packed_weights_take_17_bytes_for_32_elements():
    assert counts.mxfp4_weight_bytes(1, 32) == 17
    assert counts.mxfp4_weight_bytes(3072, 3584) == 5_849_088


def test_experts_count_the_matrices_touched_and_the_rows_of_all_pairs():
    assert counts.experts_bytes(16, 4, 16, 3584, 3072, 2) == 16 * 3 * 5_849_088 + 4 * (2 * 3584 * 2 + 16 * 12)
    assert counts.experts_flops(4, 16, 3584, 3072) == 4 * 16 * 3 * 2 * 3584 * 3072


@pytest.mark.parametrize(
    ("case", "bytes_moved", "flops"),
    [
        ("kda_decode", 51_316_224, 44_040_192),
        ("kda_prefill_4096", 131_072 * 641 * 4 + 32 * 65_536, 23_622_320_128),
        ("mxfp4_expert_1", 3 * 5_849_088 + 2 * 3584 * 2 + 12, 3 * 2 * 3072 * 3584),
        ("linear_router_4_fp32", 4 * (7168 * 896 + 4 * 8064), 2 * 4 * 7168 * 896),
        ("mla_decode_fp32", 4 * 4096 * (576 * 4 + 4) + 4 * 96 * 4 * 1088, 4 * 4096 * 96 * 2 * 1088),
    ],
)
def test_real_shapes_are_kimi_k3s(case: str, bytes_moved: int, flops: int):
    (found,) = (entry for entry in all_cases(Sizes.full()) if entry.name == case)
    assert (found.bytes_moved, found.flops) == (bytes_moved, flops)


def test_cases_have_names_of_their_own():
    names = [case.name for case in all_cases(Sizes.full(), full=True)]
    assert len(names) == len(set(names)) > 40


def test_a_verify_reads_states_and_writes_records_and_a_commit_reads_them():
    # 4 requests x 96 heads x 64 KiB read once; 32 drafts x 96 heads of q, k, v, o (512), g and beta (129) and
    # u, k, g (384) of records, all fp32.
    assert counts.kda_verify_bytes(4, 8, 96, 128, 128, 4) == 25_165_824 + 32 * 96 * (512 + 129 + 384) * 4
    assert counts.kda_verify_flops(4, 8, 96, 128, 128) == 32 * 96 * 7 * 16_384
    assert counts.kda_commit_bytes(4, 3, 96, 128, 128, 2) == 50_331_648 + 12 * 96 * (256 * 4 + 128 * 2)
    assert counts.kda_commit_flops(4, 3, 96, 128, 128) == 12 * 96 * 3 * 16_384
    assert counts.conv_verify_bytes(4, 8, 10, 4, 2) == 10 * (2 * 4 * (3 + 24) + 16)
    assert counts.conv_commit_bytes(4, 10, 4, 2) == 10 * 2 * 4 * 6


def test_a_drafted_block_reads_its_context_once_and_sees_itself():
    assert counts.block_attention_bytes(2, 100, 7, 4, 2, 8, 4) == 2 * 100 * (128 + 4) + 2 * 7 * 8 * 4 * 12
    assert counts.block_attention_flops(2, 100, 7, 4, 8) == 2 * 7 * 107 * 4 * 32
