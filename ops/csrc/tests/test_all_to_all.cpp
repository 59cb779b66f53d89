// SPDX-License-Identifier: Apache-2.0
// Checks the exchanges between ranks that MPI starts against oracle.h.
//
//   mpirun -np 4 ./test_all_to_all [--small]
//
// Ranks have a GPU each, or share one. Prints a row for each case. Ends with status 1 and one line on stderr at the
// first difference. --small leaves out cases of many values. tests/ranks/test_nvlink.py and test_all_to_all.py check
// the same kernels on more cases.
#include "exchange.h"
#include "oracle.h"
#include <cstdio>
#include <functional>
#include <mpi.h>
#include <sstream>
#include <stdexcept>

using namespace nvlink;
using oracle::Bytes;

namespace {

constexpr double SECONDS = 30;      // the deadline of every wait
constexpr double SHORT_SECONDS = 3; // the same for a rank that never comes
constexpr int64_t HALF_BYTES = 96 << 20;
constexpr uint8_t POISON = 0x5A; // of outputs, before a kernel writes them
constexpr int64_t MARGIN = 8;    // rows behind each output, which must stay as they are
constexpr int SMS[] = {24, 3, 1}; // multiprocessors for the exchanges of a case, in turn

struct Case {
  const char *name;
  Shape s;
  oracle::Routing routing = oracle::RANDOM;
  std::vector<int64_t> tokens = {37, 13, 0, 50, 5, 64, 1, 70}; // of up to eight ranks
  bool large = false;
};

const Case CASES[] = {
    {"random", {.K = 2, .E = 3, .H = 96}},
    {"blocks of 32, floor", {.K = 3, .E = 3, .H = 96, .dtype = FP16, .y_dtype = FP16, .block = 32, .floor = true}},
    {"blocks of 128, dropped", {.K = 5, .E = 3, .H = 544, .block = 128}, oracle::DROPPED},
    {"one hot expert", {.K = 2, .E = 3, .H = 32, .block = 128}, oracle::ONE_EXPERT},
    {"one rank has tokens", {.K = 1, .E = 3, .H = 96}, oracle::RANDOM, {0, 177, 0, 0, 0, 0, 0, 0}},
    {"many experts, float32", {.K = 8, .E = 40, .H = 64, .dtype = FP32, .y_dtype = FP32}},
    {"hidden 7168", {.K = 8, .E = 8, .H = 7168, .block = 128}, oracle::DISTINCT, {37, 13, 0, 50, 5, 64, 1, 70}, true},
    {"many chunks", {.K = 2, .E = 3, .H = 64}, oracle::RANDOM, {4097, 3000, 0, 5003, 100, 2000, 900, 4096}, true},
};

const Case LOW_LATENCY_CASES[] = { // at most tokens[0] on each rank
    {"random", {.K = 2, .E = 2, .H = 64}, oracle::DISTINCT, {7, 6, 0, 4, 3, 2, 0, 1}},
    {"blocks of 32, dropped", {.K = 2, .E = 2, .H = 160, .block = 32}, oracle::DROPPED, {7, 6, 0, 4, 3, 2, 0, 1}},
    {"blocks of 128, floor", {.K = 2, .E = 2, .H = 544, .dtype = FP16, .y_dtype = FP16, .block = 128, .floor = true},
     oracle::DISTINCT, {7, 6, 0, 4, 3, 2, 0, 1}},
    {"one hot expert", {.K = 1, .E = 2, .H = 64}, oracle::ONE_EXPERT, std::vector<int64_t>(8, 3)},
    {"more tokens than blocks", {.K = 6, .E = 3, .H = 32, .y_dtype = FP32}, oracle::DISTINCT,
     {40, 39, 0, 37, 36, 35, 0, 33}},
    {"hidden 7168", {.K = 8, .E = 16, .H = 7168, .block = 128}, oracle::DISTINCT, {128, 127, 0, 125, 124, 0, 1, 121},
     true},
};

template <class T> Bytes bytes(const std::vector<T> &values) {
  const auto *begin = reinterpret_cast<const uint8_t *>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

class Suite {
public:
  Suite(Ranks &ranks, bool small) : ranks(ranks), small(small) {}

  // Returns whether all cases passed.
  bool run() {
    for (const Case &c : CASES)
      if (!one("dispatch and combine", c, [&] { flat(c); }))
        return false;
    for (const Case &c : LOW_LATENCY_CASES)
      if (!one("low latency", c, [&] { low_latency(c); }))
        return false;
    return one("faults", {"a rank that stays away", {}}, [&] { stays_away(); }); // exchanges cannot go on after it
  }
  int passed = 0;

private:
  bool one(const char *group, const Case &c, const std::function<void()> &check) {
    if (small && c.large)
      return true;
    wrong.clear();
    sms = std::min(SMS[passed % std::size(SMS)], multiprocessors());
    const double start = MPI_Wtime();
    try {
      check();
    } catch (const std::exception &error) {
      note("stopped", error.what());
    }
    const std::string first = ranks.first_error(wrong);
    if (ranks.rank == 0) {
      std::printf("%-22s %-26s %-6s %8.1f ms\n", group, c.name, first.empty() ? "ok" : "WRONG",
                  1000 * (MPI_Wtime() - start));
      std::fflush(stdout);
      if (!first.empty())
        std::fprintf(stderr, "test_all_to_all: %s, case \"%s\": %s\n", group, c.name, first.c_str());
    }
    passed += first.empty();
    return first.empty();
  }

  // The case goes on after an error, since peers wait for this rank's part.
  void note(const std::string &where, const std::string &what) {
    if (wrong.empty())
      wrong = "rank " + std::to_string(ranks.rank) + ": " + where + ": " + what;
  }

  // Any NaN equals any other NaN. 0 does not equal -0.
  template <class T>
  void equal(const std::string &where, const std::vector<T> &want, const std::vector<T> &got, int64_t columns) {
    if (want.size() != got.size())
      return note(where, "expected " + std::to_string(want.size()) + " values, got " + std::to_string(got.size()));
    for (size_t i = 0; i < want.size(); i++)
      if (std::memcmp(&want[i], &got[i], sizeof(T)) && (want[i] == want[i] || got[i] == got[i])) {
        std::ostringstream text;
        text.precision(9);
        text << "row " << i / columns << ", column " << i % columns << ": expected " << +want[i] << ", got "
             << +got[i];
        return note(where, text.str());
      }
  }

  std::vector<oracle::Inputs> inputs(const Case &c) const {
    std::vector<oracle::Inputs> all;
    for (int w = 0; w < ranks.world; w++)
      all.push_back(oracle::inputs(c.routing, c.s, c.tokens[w], w, ranks.world, true));
    return all;
  }

  std::vector<int> my_sizes(const oracle::Places &at, int E) const {
    return {at.size_E.begin() + ranks.rank * E, at.size_E.begin() + (ranks.rank + 1) * E};
  }

  // The answers to the rows that are used, and the numbers of these rows. All others are NaN.
  std::pair<Bytes, std::vector<float>> answers(const Shape &s, const std::vector<oracle::Inputs> &all,
                                               const oracle::Places &at, int64_t rows) const {
    std::vector<float> number(rows, NAN);
    Bytes y(rows * s.H * bytes_of(s.y_dtype));
    for (int64_t i = 0; i < rows * s.H; i++)
      oracle::store(s.y_dtype, y.data(), i, NAN);
    for (size_t r = 0; r < all.size(); r++)
      for (size_t i = 0; i < all[r].expert_TK.size(); i++)
        if (const int64_t p = at.place_TK[r][i]; p >= 0 && all[r].expert_TK[i] / s.E == ranks.rank) {
          number[p] = oracle::number(ranks.rank, p);
          for (int h = 0; h < s.H; h++)
            oracle::store(s.y_dtype, y.data(), p * s.H + h, oracle::answer(s, ranks.rank, p, h));
        }
    return {y, number};
  }

  template <class T> static Array<T> poisoned(int64_t rows, int64_t columns) {
    Array<T> made((rows + MARGIN) * columns);
    made.fill(POISON);
    return made;
  }
  template <class T> static std::vector<T> with_margin(std::vector<T> values, int64_t columns) {
    T poison;
    std::memset(&poison, POISON, sizeof poison);
    values.resize(values.size() + MARGIN * columns, poison);
    return values;
  }

  void equal_tokens(const Shape &s, const Bytes &want, const Bytes &got) {
    const Bytes all = with_margin(want, s.H * bytes_of(s.dtype));
    equal("combine", oracle::values(s.dtype, all), oracle::values(s.dtype, got), s.H);
  }

  void flat(const Case &c) {
    const Shape &s = c.s;
    const std::vector<oracle::Inputs> all = inputs(c);
    const oracle::Inputs &mine = all[ranks.rank];
    const oracle::Places at = oracle::find_places(all, s);
    const Transport transport(ranks, sms, s);
    const Array<int64_t> ids(mine.expert_TK);
    const Array<uint8_t> x_TH(mine.x_TH);
    const Array<float> weight_TK(mine.weight_TK);

    const Plan plan = transport.plan(ids, mine.T);
    ranks.wait("places");
    const int64_t P = plan.P;
    equal("group_sizes", my_sizes(at, s.E), plan.group_sizes_E.values(), 1);
    equal<int>("the last group's end", {int(P)}, {plan.group_ends_E.values().back()}, 1);

    const oracle::Dispatched want = oracle::dispatch(all, s, at, ranks.rank, P, 0);
    for (int turn = 0; turn < 2; turn++) { // so that each half of the staging serves
      const auto out_PH = poisoned<uint8_t>(P, s.row_bytes()), out_scale = poisoned<uint8_t>(P, s.blocks());
      const auto out_weight_P = poisoned<float>(P, 1);
      transport.dispatch(plan, x_TH, weight_TK, out_PH, out_scale, out_weight_P);
      ranks.wait("dispatch");
      equal("dispatch", with_margin(want.out_PH, s.row_bytes()), out_PH.values(), s.row_bytes());
      equal("dispatch, scales", with_margin(want.scale_PB, s.blocks()), out_scale.values(), s.blocks());
      equal("dispatch, weights", with_margin(want.weight_P, 1), out_weight_P.values(), 1);
    }

    const auto [y, number] = answers(s, all, at, P);
    const Array<uint8_t> y_PH(y);
    const Array<float> weight_P(number);
    const auto out_TH = poisoned<uint8_t>(mine.T, s.H * bytes_of(s.dtype));
    const auto out_weight_TK = poisoned<float>(mine.T, s.K);
    transport.combine(plan, y_PH, weight_P, out_TH, out_weight_TK);
    ranks.wait("combine");
    const oracle::Combined back = oracle::combine(all, s, at, ranks.rank);
    equal_tokens(s, back.out_TH, out_TH.values());
    equal("combine, weights", with_margin(back.weight_TK, s.K), out_weight_TK.values(), s.K);
  }

  void low_latency(const Case &c) {
    const Shape &s = c.s;
    const std::vector<oracle::Inputs> all = inputs(c);
    const oracle::Inputs &mine = all[ranks.rank];
    const LowLatencyExchange exchange(ranks, sms, int(c.tokens[0]), s);
    const int64_t rows = s.E * exchange.rows();
    const oracle::Places at = oracle::find_places(all, s, exchange.rows());
    const Array<int64_t> ids(mine.expert_TK);
    const Array<uint8_t> x_TH(mine.x_TH);
    const Array<float> weight_TK(mine.weight_TK);

    const oracle::Dispatched want = oracle::dispatch(all, s, at, ranks.rank, rows, POISON);
    for (int turn = 0; turn < 2; turn++) {
      const Array<int> out_count_E(s.E);
      const auto out_ERH = poisoned<uint8_t>(rows, s.row_bytes()), out_scale = poisoned<uint8_t>(rows, s.blocks());
      exchange.dispatch(ids, mine.T, x_TH, out_count_E, out_ERH, out_scale);
      ranks.wait("dispatch");
      equal("rows", my_sizes(at, s.E), out_count_E.values(), 1);
      equal("dispatch", with_margin(want.out_PH, s.row_bytes()), out_ERH.values(), s.row_bytes());
      equal("dispatch, scales", with_margin(want.scale_PB, s.blocks()), out_scale.values(), s.blocks());
    }

    const Array<uint8_t> y_ERH(answers(s, all, at, rows).first);
    const auto out_TH = poisoned<uint8_t>(mine.T, s.H * bytes_of(s.dtype));
    exchange.combine(ids, mine.T, weight_TK, y_ERH, out_TH);
    ranks.wait("combine");
    equal_tokens(s, oracle::low_latency_combine(all, s, at, ranks.rank), out_TH.values());
  }

  // The last rank makes no call. All others must name it.
  void stays_away() {
    const int last = ranks.world - 1;
    ranks.seconds = SHORT_SECONDS;
    if (ranks.rank == last)
      return;
    std::string said = "no error";
    try {
      Transport(ranks, sms, {.K = 1, .E = 1}).plan(Array(std::vector<int64_t>(64)), 64);
    } catch (const std::exception &error) {
      said = error.what();
    }
    if (said.find("waited for rank " + std::to_string(last) + " until the deadline") == std::string::npos)
      note("the error", said);
  }

  Ranks &ranks;
  const bool small;
  int sms = 1;
  std::string wrong; // the first error of this case on this rank
};

int run(int argc, char **argv) {
  const bool small = argc == 2 && std::string(argv[1]) == "--small";
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    if (argc > 1 && !small)
      throw std::runtime_error(std::string(argv[1]) + ": expected --small, or nothing");
    Ranks ranks(HALF_BYTES, SECONDS);
    if (rank == 0)
      std::printf("%d ranks, %d on a device: %s\n", ranks.world, ranks.sharing, ranks.device_name.c_str());
    Suite suite(ranks, small);
    if (!suite.run())
      return 1;
    if (rank == 0)
      std::printf("%d cases: all equal to the oracle\n", suite.passed);
    return 0;
  } catch (const std::exception &error) {
    if (rank == 0)
      std::fprintf(stderr, "test_all_to_all: %s\n", error.what());
    return 1;
  }
}

} // namespace

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  const int status = run(argc, argv);
  MPI_Finalize();
  return status;
}
