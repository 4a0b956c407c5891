"""Kernels by class of their names, and the time in which none runs."""

from __future__ import annotations

import pytest

from tools.benchmark.kernel_classes import Kernel, class_of, time_by_class


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "optimizer"),
        ("void at::native::vectorized_layer_norm_kernel<BFloat16, float>", "layer norm"),
        ("void at::native::GammaBetaBackwardCUDAKernelTemplate", "layer norm"),
        ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d", "cross entropy"),
        ("cunn_SoftMaxForward<LogSoftMaxForwardEpilogue> log_softmax", "cross entropy"),
        ("embedding_backward_feature_kernel", "embedding and indexing"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, GeluCUDAKernelImpl::{lambda()}>", "elementwise and others"),
        ("add_norm_gradient_kernel", "layer norm"),
        ("key_value_kernel", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void at::native::reduce_kernel<512, 1>", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise and others"),
    ],
)
def test_classes(name: str, expected: str) -> None:
    assert class_of(name) == expected


def test_times_and_gaps() -> None:
    """Two kernels overlap for 100 microseconds; nothing runs for the first 500 and the last 300."""
    kernels = [Kernel("gemm b", 900.0, 1200.0), Kernel("gemm a", 500.0, 1000.0), Kernel("elementwise", 1200.0, 1700.0)]
    table = time_by_class(kernels, 2000.0)
    assert table.rows == [
        ("matrix products", "0.80", "40.0 %", "2"),
        ("elementwise and others", "0.50", "25.0 %", "1"),
        ("no kernel runs", "0.80", "40.0 %", "-"),
    ]
    assert "2.0 ms" in table.title
