// SPDX-License-Identifier: Apache-2.0
// Checks the oracle itself, without a GPU and without MPI: formats by their definitions, and exchanges worked out by
// hand.
#include "oracle.h"
#include <cstdio>
#include <cstdlib>

using namespace oracle;

namespace {

int checks = 0;

void check(bool right, const char *what, int line) {
  checks++;
  if (right)
    return;
  std::fprintf(stderr, "test_oracle: line %d: wrong: %s\n", line, what);
  std::exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void every_code_comes_back(const Format &f) {
  for (uint32_t code = 0; code < 1u << f.bits; code++) {
    const float value = decode(f, code);
    if (std::isnan(value))
      CHECK(encode(f, value) == f.nan);
    else
      CHECK(encode(f, value) == code);
  }
}

// The nearest value of e4m3, found among all of them.
uint32_t nearest_e4m3(float v) {
  const double magnitude = std::min(std::fabs(double(v)), 448.0);
  uint32_t best = 0;
  for (uint32_t code = 1; code < 0x7F; code++) {
    const double now = std::fabs(decode(E4M3_FORMAT, code) - magnitude);
    const double least = std::fabs(decode(E4M3_FORMAT, best) - magnitude);
    if (now < least || (now == least && code % 2 == 0))
      best = code;
  }
  return best | (std::signbit(v) ? 0x80 : 0);
}

void formats() {
  every_code_comes_back(BF16_FORMAT);
  every_code_comes_back(FP16_FORMAT);
  every_code_comes_back(E4M3_FORMAT);
  CHECK(decode(E4M3_FORMAT, 0x7E) == 448 && decode(E4M3_FORMAT, 0x01) == 0x1p-9f && decode(E4M3_FORMAT, 0x38) == 1);
  CHECK(decode(FP16_FORMAT, 0x3C00) == 1 && decode(FP16_FORMAT, 0x7BFF) == 65504);
  CHECK(decode(FP16_FORMAT, 1) == 0x1p-24f && decode(FP16_FORMAT, 0xFC00) == -INFINITY);
  CHECK(decode(BF16_FORMAT, 0xC020) == -2.5f && decode(BF16_FORMAT, 1) == 0x1p-133f);
  CHECK(encode(FP16_FORMAT, 65519.0f) == 0x7BFF && encode(FP16_FORMAT, 65520.0f) == 0x7C00);
  CHECK(encode(BF16_FORMAT, 3.4e38f) == 0x7F80 && encode(BF16_FORMAT, -INFINITY) == 0xFF80);
  CHECK(encode(BF16_FORMAT, 1 + 0x1p-8f) == 0x3F80 && encode(BF16_FORMAT, 1 + 0x1.8p-7f) == 0x3F82); // ties to even
  CHECK(encode(E4M3_FORMAT, 1e9f) == 0x7E && encode(E4M3_FORMAT, -0.0f) == 0x80);
  for (uint32_t i = 0; i < 20000; i++) {
    const float v = std::ldexp(float(int32_t(i * 2654435761u)), int(i % 24) - 45);
    CHECK(encode(E4M3_FORMAT, v) == nearest_e4m3(v));
  }
}

void scales() {
  CHECK(scale_byte(448, false) == 127 && scale_byte(449, false) == 128 && scale_byte(449, true) == 127);
  CHECK(scale_byte(256, true) == 127 && scale_byte(255, true) == 126 && scale_byte(255, false) == 127);
  CHECK(scale_byte(0, false) == 0 && scale_byte(1e-40f, false) == 0 && scale_byte(1e-40f, true) == 0);
  CHECK(scale_byte(INFINITY, false) == 255 && scale_byte(NAN, true) == 255);
  CHECK(scale_of(0) == 0x1p-127f && scale_of(127) == 1 && std::isnan(scale_of(255)));

  float row[40] = {1, -0.0f, 449, 896}; // a block of 32, and one of 8 with a NaN
  row[35] = NAN;
  uint8_t data[40], scale[2];
  quantize(row, 40, 32, false, data, scale);
  CHECK(scale[0] == 128 && scale[1] == 255);
  CHECK(data[0] == 0x30 && data[1] == 0x80 && data[3] == 0x7E && data[39] == 0x7F);
  CHECK(dequantized(data[3], scale[0]) == 896 && std::isnan(dequantized(data[39], scale[1])));
  quantize(row, 32, 32, true, data, scale); // 896 has the exponent 9
  CHECK(scale[0] == 128 && dequantized(data[2], scale[0]) == 448);
}

// Two ranks with two experts each. Tokens of one value, in float32.
std::vector<Inputs> two_ranks() {
  std::vector<Inputs> ranks(2);
  const float x[2][2] = {{1, 2}, {3, 0}};
  ranks[0] = {2, {2, 0, 2, 3}, Bytes(8), {0.5f, 1, 2, 4}}; // token 0: experts 2 and 0. Token 1: experts 2 and 3
  ranks[1] = {1, {2, 9}, Bytes(4), {8, 16}};               // its second choice is dropped
  for (int r = 0; r < 2; r++)
    std::memcpy(ranks[r].x_TH.data(), x[r], ranks[r].x_TH.size());
  return ranks;
}

void exchanges() {
  const std::vector<Inputs> ranks = two_ranks();
  Shape s{.K = 2, .E = 2, .H = 1, .dtype = nvlink::FP32, .y_dtype = nvlink::FP32};
  Places at = find_places(ranks, s);
  CHECK((at.size_E == std::vector<int>{1, 0, 3, 1}) && (at.end_W == std::vector<int64_t>{128, 256}));
  CHECK((at.place_TK[0] == std::vector<int>{0, 0, 1, 128}) && (at.place_TK[1] == std::vector<int>{2, -1}));

  const Dispatched sent = dispatch(ranks, s, at, 1, 256);
  const auto out = [&](int64_t p) { return load(nvlink::FP32, sent.out_PH.data(), p); };
  CHECK(out(0) == 1 && out(1) == 2 && out(2) == 3 && out(3) == 0 && out(128) == 2);
  CHECK(sent.weight_P[1] == 2 && sent.weight_P[2] == 8 && sent.weight_P[3] == 0 && sent.weight_P[128] == 4);

  // Token 1 gets two rows of rank 1. bf16 rounds their sum once: 256 + 1.5 becomes 258, and 256 + 0.75 + 0.75 too.
  s.dtype = nvlink::BF16;
  const auto y = [](int w, int64_t p, int) { return w == 0 ? -0.0f : p == 1 ? 256 : p == 128 ? 1.5f : -0.0f; };
  const Combined back = combine(ranks, s, at, 0, y, [](int w, int64_t p) { return float(10 * w + p); });
  CHECK(same_bits(load(nvlink::BF16, back.out_TH.data(), 0), 0.0f)); // a sum of -0 and -0, begun with 0
  CHECK(load(nvlink::BF16, back.out_TH.data(), 1) == 258);
  CHECK((back.weight_TK == std::vector<float>{10, 0, 11, 138}));

  // Token 0 gets 257 from rank 0 and -1 from rank 1. bf16 rounds 257 to 256. In one node the sum is rounded alone.
  const auto odd = [](int w, int64_t, int) { return w == 0 ? 257.0f : -1.0f; };
  const auto first = [&](int node_size) {
    const auto number = [](int, int64_t) { return 1.0f; };
    return load(nvlink::BF16, combine(ranks, s, at, 0, odd, number, node_size).out_TH.data(), 0);
  };
  CHECK(first(1) == 255 && first(2) == 256);

  // At low latency each expert has room for 4 rows.
  const Shape plain{.K = 2, .E = 2, .H = 1, .dtype = nvlink::FP32};
  const LowLatencyDispatched few = low_latency_dispatch(ranks, plain, 1, 4, 9);
  CHECK((few.count_E == std::vector<int>{3, 1}));
  CHECK(load(nvlink::FP32, few.out_ERH.data(), 2) == 3 && load(nvlink::FP32, few.out_ERH.data(), 4) == 2);
  CHECK(few.out_ERH[12] == 9 && few.out_ERH.size() == 32);
  const Bytes weighted = low_latency_combine(ranks, s, 0, 4, [](int w, int64_t p, int) { return float(100 * w + p); });
  CHECK(load(nvlink::BF16, weighted.data(), 0) == 0.5f * 100 + 1 * 0);
  CHECK(load(nvlink::BF16, weighted.data(), 1) == 616); // 2 * 101 + 4 * 104 = 618, between 616 and 620. 616 is even
}

// Three groups of 300, 40 and 500 rows in room for 640: 384, 128 and 512 rows with their padding do not fit. The
// largest multiple of 128 to which all can be cut is 256.
void capacity() {
  std::vector<Inputs> ranks(2);
  for (int r = 0; r < 2; r++) {
    ranks[r].T = 420;
    for (int e = 0; e < 3; e++)
      ranks[r].expert_TK.insert(ranks[r].expert_TK.end(), std::vector{150, 20, 250}[e], e);
  }
  const Places at = find_places(ranks, {.K = 1, .E = 3, .H = 1, .room = 640});
  CHECK((std::vector<int>(at.size_E.begin(), at.size_E.begin() + 3) == std::vector<int>{256, 40, 256}));
  CHECK(at.dropped_W[0] == 44 + 244 && at.end_W[0] == 640);
  CHECK(at.place_TK[0][127] == 127 && at.place_TK[0][128] == -1); // each rank keeps half of 256
  CHECK(at.place_TK[1][0] == 128 && at.place_TK[1][128] == -1 && at.place_TK[1][150] == 256 + 20);
}

void differences() {
  const Bytes a{0x80, 0x3F, 0xC0, 0x7F}, b{0x80, 0x3F, 0xC1, 0xFF}, c{0x80, 0xBF, 0xC0, 0x7F};
  CHECK(first_difference(nvlink::BF16, a, b, 2) == ""); // two NaNs
  CHECK(first_difference(nvlink::BF16, a, c, 2) == "row 0, column 0: expected 1, got -1");
  CHECK(first_difference(a, c, 1) == "row 1, column 0: expected 0x3f, got 0xbf");
  CHECK(first_difference(a, {}, 1) == "expected 4 bytes, got 0");
}

} // namespace

int main() {
  formats();
  scales();
  exchanges();
  capacity();
  differences();
  std::printf("%d checks of the oracle passed\n", checks);
}
