// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of few tokens at low latency, over any wire.
//
// In dispatch, each rank has a region in every staging, where a token has a record at its own index. A token can
// therefore be sent before anything is counted. Its record holds its row, its scales and its route: for each choice,
// the expert, and the index of its row among the rows of the same rank and expert. A token is sent once to each rank
// that serves it. Other ranks get only its route. The rows of an expert are in the order of (rank, token, choice).
// Combine sends a row for each choice, because only the token's owner has the weights. There the rows of a token are
// in the order of (rank, choice), so that those from one rank lie together.
#pragma once
#include "low_latency_combine.cuh"
#include "low_latency_dispatch.cuh"

namespace nvlink {

template <class Action> int with_row(const LowLatencyDispatch &a, Action action) {
  switch (a.block * 4 + a.dtype) {
  case 32 * 4 + BF16: return action(Quantized<__nv_bfloat16, 32>());
  case 32 * 4 + FP16: return action(Quantized<__half, 32>());
  case 128 * 4 + BF16: return action(Quantized<__nv_bfloat16, 128>());
  case 128 * 4 + FP16: return action(Quantized<__half, 128>());
  default: return action(Plain());
  }
}

template <class Action> int with_types(const LowLatencyCombine &a, Action action) {
  return with_type(a.dtype, [&](auto in) {
    return a.out_dtype == FP16 ? action(in, Type<__half>()) : action(in, Type<__nv_bfloat16>());
  });
}

// The functions of kernels.h, for one wire.
template <class Wire> int launch_over(const LowLatencyDispatch &a, int sms, Address stream) {
  const LowLatency &c = a.common;
  const int bytes = max(c.T * c.K + c.local_experts, c.group.world * c.local_experts) * int(sizeof(int));
  return with_row(a, [&](auto row) {
    low_latency_dispatch<Wire, decltype(row)>
        <<<sms, THREADS, bytes, reinterpret_cast<cudaStream_t>(stream)>>>(a, row);
    return int(cudaGetLastError());
  });
}

template <class Wire> int launch_over(const LowLatencyCombine &a, int sms, Address stream) {
  return with_types(a, [&](auto in, auto out) {
    low_latency_combine<Wire, typename decltype(in)::type, typename decltype(out)::type>
        <<<sms, THREADS, 0, reinterpret_cast<cudaStream_t>(stream)>>>(a);
    return int(cudaGetLastError());
  });
}

template <class Wire> int load_over() {
  const auto load = [](auto *kernel, int most_shared_bytes) {
    if (const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes))
      return error;
    cudaFuncAttributes unused;
    return int(cudaFuncGetAttributes(&unused, kernel));
  };
  for (int block : {0, 32, 128})
    for (int dtype : {BF16, FP16}) {
      LowLatencyDispatch a;
      a.block = block;
      a.dtype = dtype;
      if (int error = with_row(a, [&](auto row) {
            return load(low_latency_dispatch<Wire, decltype(row)>, MOST_SHARED_BYTES);
          }))
        return error;
    }
  for (int dtype : {BF16, FP16, FP32})
    for (int out_dtype : {BF16, FP16}) {
      LowLatencyCombine a;
      a.dtype = dtype;
      a.out_dtype = out_dtype;
      if (int error = with_types(a, [&](auto in, auto out) {
            return load(low_latency_combine<Wire, typename decltype(in)::type, typename decltype(out)::type>, 0);
          }))
        return error;
    }
  return 0;
}

} // namespace nvlink
