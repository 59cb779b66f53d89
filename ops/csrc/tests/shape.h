// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "../nvlink/kernels.h"

inline int bytes_of(int dtype) { return dtype == nvlink::FP32 ? 4 : 2; }

// The sizes of an exchange, and how rows travel. Letters are those of kernels.h.
struct Shape {
  int K = 0, E = 0, H = 0;    // E: experts of one rank
  int dtype = nvlink::BF16;   // of x, and of what combine gives
  int y_dtype = nvlink::BF16; // of the experts' rows
  int block = 0;              // as Rows::block
  bool floor = false;

  int row_bytes() const { return block ? H : H * bytes_of(dtype); } // of a row as it travels in dispatch
  int blocks() const { return block ? (H + block - 1) / block : 0; }
};
