// SPDX-License-Identifier: Apache-2.0
// Python classes for the structs that two extensions have: of exchanges of rows, and of the low-latency exchange.
#pragma once
#include "fields.h"
#include "kernels.h"

namespace nvlink {

inline void expose_shared(py::module_ &m) {
  expose<Group>(m, "Group",
        {FIELD(Group, peer), FIELD(Group, state), FIELD(Group, failure), FIELD(Group, rank), FIELD(Group, world),
         FIELD(Group, half_bytes), FIELD(Group, timeout_ns), FIELD(Group, signature)});
  expose<RowExchange>(m, "RowExchange",
        {FIELD(RowExchange, group), FIELD(RowExchange, x), FIELD(RowExchange, rows), FIELD(RowExchange, out),
         FIELD(RowExchange, other_state), FIELD(RowExchange, send_at), FIELD(RowExchange, recv_at),
         FIELD(RowExchange, row), FIELD(RowExchange, region), FIELD(RowExchange, chunk), FIELD(RowExchange, chunks)});
  expose<LowLatency>(m, "LowLatency",
        {FIELD(LowLatency, group), FIELD(LowLatency, index_TK), FIELD(LowLatency, bound), FIELD(LowLatency, routes),
         FIELD(LowLatency, message), FIELD(LowLatency, lands_at), FIELD(LowLatency, outbox_at),
         FIELD(LowLatency, record), FIELD(LowLatency, count_at), FIELD(LowLatency, scale_at),
         FIELD(LowLatency, route_at), FIELD(LowLatency, T), FIELD(LowLatency, K), FIELD(LowLatency, experts),
         FIELD(LowLatency, local_experts), FIELD(LowLatency, max_tokens), FIELD(LowLatency, H),
         FIELD(LowLatency, index_bytes), FIELD(LowLatency, send), FIELD(LowLatency, receive),
         FIELD(LowLatency, crew)});
  expose<LowLatencyDispatch>(m, "LowLatencyDispatch",
        {FIELD(LowLatencyDispatch, common), FIELD(LowLatencyDispatch, x_TH), FIELD(LowLatencyDispatch, scale_in),
         FIELD(LowLatencyDispatch, out_ERH), FIELD(LowLatencyDispatch, out_scale),
         FIELD(LowLatencyDispatch, out_count_E), FIELD(LowLatencyDispatch, scale_strides),
         FIELD(LowLatencyDispatch, row_bytes), FIELD(LowLatencyDispatch, dtype), FIELD(LowLatencyDispatch, block),
         FIELD(LowLatencyDispatch, floor), FIELD(LowLatencyDispatch, scale_row), FIELD(LowLatencyDispatch, scales),
         FIELD(LowLatencyDispatch, scale_kind)});
  expose<LowLatencyCombine>(m, "LowLatencyCombine",
        {FIELD(LowLatencyCombine, common), FIELD(LowLatencyCombine, y_ERH), FIELD(LowLatencyCombine, weight_TK),
         FIELD(LowLatencyCombine, out_TH), FIELD(LowLatencyCombine, dtype), FIELD(LowLatencyCombine, out_dtype)});
}

} // namespace nvlink
