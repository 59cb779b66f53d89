// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine in two hops, as ds_mxfp8_moe/transport/hierarchical.py has them. Rows travel by
// ops/csrc/nvlink/row_exchange.cu. Plain C++ on the host does the work before, between and after the exchanges.
//
// Letters in names are those of kernels.h, and N nodes, G ranks of a node, C rows that this rank sends to nodes, L
// rows that land here for this node.
#pragma once
#include "exchange.h"

// The two hops of this rank. Rank i has the index i % node_size in node i / node_size.
struct Hops {
  // Collective. `node_size`: divides the number of ranks. `half_bytes`: of each hop's staging.
  Hops(const Ranks &all, int node_size, int64_t half_bytes);

  int nodes, node_size, node, index;
  Ranks between; // the ranks of this index in all nodes
  Ranks inside;  // the ranks of this node
};

// The rows that this rank sends in one hop, and how many it receives.
struct Sends {
  std::vector<int64_t> row_S; // which row each one is, ascending by (rank, row)
  std::vector<std::vector<int64_t>> slot_WN; // the row sent in which row n goes to rank w. -1 where it does not go
  std::vector<int64_t> send_W, receive_W; // rows to and from each rank of the hop
  int64_t most = 0; // the most rows that any rank sends to another one in this hop, wherever it is
};

// Bytes of a row as it travels: data, scales and `weights` routing weights, rounded up to what the kernel takes.
int64_t row_bytes_of(const Wire &wire, int weights);

struct TwoHopPlan {
  int64_t T = 0, P = 0; // P: rows of groups, with their padding
  int K = 0;
  device::Array<int> group_ends_E, group_sizes_E;
  Sends between, inside;
  std::vector<int64_t> place_RK; // of each row as it arrived. -1 if another rank serves the choice, or none does
};

// An exchange of rows in one hop. Each launch is one more exchange of the same rows. If an exchange of the other hop
// has failed, it does nothing.
class RowsOfHop {
public:
  // `rows`: row_bytes each, a multiple of 16. `send` and `receive`: how many go to and come from each rank of the hop.
  // `most`: no rank sends more of them to another one. `row_S`: which rows are sent, in rank order. Empty: all.
  RowsOfHop(const Ranks &hop, const Ranks &other, const std::vector<uint8_t> &rows, int64_t row_bytes,
            const std::vector<int64_t> &send, const std::vector<int64_t> &receive, int64_t most,
            const std::vector<int64_t> &row_S = {});
  void launch(int sms) const;
  // Waits. The rows that arrived, in rank order. What was not written is UNWRITTEN.
  std::vector<uint8_t> arrived() const;

  static constexpr uint8_t UNWRITTEN = 0x5A;

private:
  const Ranks &hop;
  nvlink::RowExchange args;
  device::Array<uint8_t> x, out;
  device::Array<int64_t> sent;
};

// As Transport, without a capacity. The host waits for each exchange.
class TwoHops {
public:
  TwoHops(const Hops &hops, int sms) : hops(hops), sms(sms) {}

  TwoHopPlan plan(const device::Array<int64_t> &ids, int64_t T, int K, int E) const;
  void dispatch(const TwoHopPlan &plan, const Wire &wire, const device::Array<uint8_t> &x_TH,
                const device::Array<float> &weight_TK, const device::Array<uint8_t> &out_PH,
                const device::Array<uint8_t> &out_scale, const device::Array<float> &out_weight_P,
                bool weights = true) const;
  void combine(const TwoHopPlan &plan, const Wire &wire, int y_dtype, const device::Array<uint8_t> &y_PH,
               const device::Array<float> &weight_P, const device::Array<uint8_t> &out_TH,
               const device::Array<float> &out_weight_TK, bool weights = true) const;

private:
  std::vector<uint8_t> between(const std::vector<uint8_t> &rows, int64_t row_bytes, const std::vector<int64_t> &send,
                               const std::vector<int64_t> &receive, int64_t most,
                               const std::vector<int64_t> &row_S = {}) const;
  std::vector<uint8_t> inside(const std::vector<uint8_t> &rows, int64_t row_bytes, const std::vector<int64_t> &send,
                              const std::vector<int64_t> &receive, int64_t most,
                              const std::vector<int64_t> &row_S = {}) const;

  const Hops &hops;
  int sms;
};
