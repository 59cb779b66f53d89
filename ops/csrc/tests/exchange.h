// SPDX-License-Identifier: Apache-2.0
// The host's side of the exchanges, as ds_mxfp8_moe/transport/nvlink.py and ds_mxfp8_moe/all_to_all.py have it. All
// functions are collective, launch on the stream and throw std::runtime_error.
#pragma once
#include "ranks.h"
#include "shape.h"

// One routing: the tables that dispatch and combine read.
struct Plan {
  int64_t P = 0, most_rows = 0;
  nvlink::Rows rows;
  Array<int> first_CB, counts_WC, place_base_E, place_end_E, segments, group_ends_E, group_sizes_E, slot_WT,
      place_RK, arriving_WC;
};

// Dispatch and combine of ops/csrc/nvlink/{route,dispatch,combine}.cu.
class Transport {
public:
  Transport(const Ranks &ranks, int sms, const Shape &s) : ranks(ranks), sms(sms), s(s) {}

  // ids: [T, K] on the device. The host waits for the counts.
  Plan plan(const Array<int64_t> &ids, int64_t T) const;
  // Outputs are [P, H], [P, blocks] and [P].
  void dispatch(const Plan &plan, const Array<uint8_t> &x_TH, const Array<float> &weight_TK,
                const Array<uint8_t> &out_PH, const Array<uint8_t> &out_scale,
                const Array<float> &out_weight_P) const;
  // Outputs are [T, H] and [T, K].
  void combine(const Plan &plan, const Array<uint8_t> &y_PH, const Array<float> &weight_P,
               const Array<uint8_t> &out_TH, const Array<float> &out_weight_TK) const;

private:
  nvlink::Rows rows(const Plan &plan, nvlink::Kind kind) const;

  const Ranks &ranks;
  const int sms;
  const Shape s;
};

// Dispatch and combine of ops/csrc/nvlink/low_latency.cu.
class LowLatencyExchange {
public:
  LowLatencyExchange(const Ranks &ranks, int sms, int max_tokens, const Shape &s);

  int64_t rows() const { return int64_t(max_tokens) * ranks.world; } // for which an expert has room

  // Outputs are [E], [E, rows(), H] and [E, rows(), blocks].
  void dispatch(const Array<int64_t> &ids, int64_t T, const Array<uint8_t> &x_TH,
                const Array<int> &out_count_E, const Array<uint8_t> &out_ERH,
                const Array<uint8_t> &out_scale) const;
  void combine(const Array<int64_t> &ids, int64_t T, const Array<float> &weight_TK,
               const Array<uint8_t> &y_ERH, const Array<uint8_t> &out_TH) const;

private:
  nvlink::LowLatency common(nvlink::Kind kind, const Array<int64_t> &ids, int64_t T) const;

  const Ranks &ranks;
  const int sms, max_tokens;
  const Shape s;
  const int scale_row;
  int route_at = 0; // as in LowLatency
  int64_t record = 0, count_at = 0, message = 0;
  Array<int> routes;
};
