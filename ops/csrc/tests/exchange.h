// SPDX-License-Identifier: Apache-2.0
// The host's side of the exchanges, as ds_mxfp8_moe/transport/nvlink.py and ds_mxfp8_moe/all_to_all.py have it.
#pragma once
#include "ranks.h"

// How rows travel.
struct Wire {
  int H = 0;
  int dtype = 0; // of the tokens
  int block = 0; // as nvlink::Rows::block
  bool floor = false;
};

// One routing: the tables that dispatch and combine read.
struct Plan {
  int64_t T = 0, P = 0, most_rows = 0;
  int E = 0;
  nvlink::Rows rows;
  device::Array<int> first_CB, counts_WC, place_base_E, place_end_E, segments, group_ends_E, group_sizes_E, slot_WT,
      place_RK, arriving_WC;
};

// Dispatch and combine of ops/csrc/nvlink/{route,dispatch,combine}.cu. All functions are collective, launch on
// device::stream() and throw std::runtime_error.
class Transport {
public:
  Transport(const Ranks &ranks, int sms) : ranks(ranks), sms(sms) {}

  // ids: [T, K] on the device. E: experts of one rank. room: 0, or the capacity of P, with which the host never waits.
  // dropped: with a capacity, an int64 in host memory, as nvlink::Totals::dropped. Otherwise nullptr.
  Plan plan(const device::Array<int64_t> &ids, int64_t T, int K, int E, int64_t room = 0,
            int64_t *dropped = nullptr) const;
  // Outputs are [P, H], [P, blocks] and [P]. `weight_TK` and `weight_P` may be empty.
  void dispatch(const Plan &plan, const Wire &wire, const device::Array<uint8_t> &x_TH,
                const device::Array<float> &weight_TK, const device::Array<uint8_t> &out_PH,
                const device::Array<uint8_t> &out_scale, const device::Array<float> &out_weight_P,
                bool weights = true) const;
  // y_PH: [P, H] of y_dtype. Outputs are [T, H] of the wire's dtype and [T, K].
  void combine(const Plan &plan, const Wire &wire, int y_dtype, const device::Array<uint8_t> &y_PH,
               const device::Array<float> &weight_P, const device::Array<uint8_t> &out_TH,
               const device::Array<float> &out_weight_TK, bool weights = true) const;

private:
  nvlink::Rows rows(const Plan &plan, nvlink::Kind kind, const Wire &wire, bool weights) const;

  const Ranks &ranks;
  int sms;
};

// Dispatch and combine of ops/csrc/nvlink/low_latency.cu.
class LowLatencyExchange {
public:
  LowLatencyExchange(const Ranks &ranks, int sms, int max_tokens, int K, int E, const Wire &wire);

  int64_t rows() const { return int64_t(max_tokens) * ranks.world; } // for which an expert has room

  // Outputs are [E], [E, rows(), H] and [E, rows(), blocks]. split: sends and receives by two kernels.
  void dispatch(const device::Array<int64_t> &ids, int64_t T, const device::Array<uint8_t> &x_TH,
                const device::Array<int> &out_count_E, const device::Array<uint8_t> &out_ERH,
                const device::Array<uint8_t> &out_scale, bool split = false) const;
  void combine(const device::Array<int64_t> &ids, int64_t T, const device::Array<float> &weight_TK, int y_dtype,
               const device::Array<uint8_t> &y_ERH, const device::Array<uint8_t> &out_TH, bool split = false) const;

private:
  nvlink::LowLatency common(nvlink::Kind kind, const device::Array<int64_t> &ids, int64_t T) const;

  const Ranks &ranks;
  int sms, max_tokens, K, E;
  Wire wire;
  int scale_row = 0;
  int route_at = 0; // as in LowLatency
  int64_t record = 0, count_at = 0, message = 0;
  device::Array<int> routes;
};
