// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine give, in plain C++ on the host, from the inputs of all ranks. Letters in names are those
// of kernels.h.
#pragma once
#include "formats.h"
#include <functional>
#include <string>

namespace oracle {

// What one rank brings. A choice with an id below 0 or above the last expert is dropped.
struct Inputs {
  int64_t T = 0;
  std::vector<int64_t> expert_TK;
  Bytes x_TH; // of Shape::dtype
  std::vector<float> weight_TK;
};

struct Shape {
  int K = 0, E = 0, H = 0; // E: experts of one rank
  int dtype = 0;           // of x, and of what combine gives
  int y_dtype = 0;         // of the experts' rows
  int block = 0;           // as Rows::block
  bool floor = false;
  int64_t room = 0; // most rows of a rank's experts, as Totals::most_rows. 0 sets no limit
};

// Where each row lies.
struct Places {
  std::vector<int> size_E;                // of all ranks' experts: rows that fit
  std::vector<std::vector<int>> place_TK; // of each rank: the place of each choice, -1 if it is dropped
  std::vector<int64_t> end_W;             // of each rank: where its last group ends
  std::vector<int64_t> dropped_W;         // of each rank: choices for its experts that do not fit
};
Places find_places(const std::vector<Inputs> &ranks, const Shape &s);

struct Dispatched {
  Bytes out_PH, scale_PB;
  std::vector<float> weight_P;
};
// What rank `w` receives, in P rows.
Dispatched dispatch(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int w, int64_t P);

// The experts' answers: value h of the row at place p of rank w, in y_dtype, and the row's number.
using Answer = std::function<float(int w, int64_t p, int h)>;
using Number = std::function<float(int w, int64_t p)>;

struct Combined {
  Bytes out_TH;
  std::vector<float> weight_TK;
};
// What the tokens of rank `me` become. A node's ranks add up before they round: in two hops these are the ranks of a
// host, and in the flat exchange each rank is a node of its own.
Combined combine(const std::vector<Inputs> &ranks, const Shape &s, const Places &at, int me, const Answer &y,
                 const Number &number, int node_size = 1);

// The same at low latency. `rows`: rows that each expert has room for.
struct LowLatencyDispatched {
  std::vector<int> count_E;
  Bytes out_ERH, scale_ERB; // rows behind an expert's count keep `poison`
};
LowLatencyDispatched low_latency_dispatch(const std::vector<Inputs> &ranks, const Shape &s, int w, int64_t rows,
                                          uint8_t poison);
// `y(w, p, h)`: p counts the rows of all of w's experts. Gives [T, H].
Bytes low_latency_combine(const std::vector<Inputs> &ranks, const Shape &s, int me, int64_t rows, const Answer &y);

// The first difference between two arrays of `dtype`, in words. "" if they are equal. Any NaN equals any other NaN.
std::string first_difference(int dtype, const Bytes &want, const Bytes &got, int64_t columns);
// The same for bytes, printed as hexadecimal numbers.
std::string first_difference(const Bytes &want, const Bytes &got, int64_t columns);

} // namespace oracle
