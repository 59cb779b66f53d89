// SPDX-License-Identifier: Apache-2.0
// Checks the exchanges between ranks that MPI starts against oracle.cpp.
//
//   mpirun -np 4 ./test_all_to_all [--small] [part of a case's name]
//
// Ranks have a GPU each, or share one. Prints a row for each case. Ends with status 1 and one line on stderr at the
// first difference. --small leaves out cases of many values.
#include "cases.h"
#include "two_hops.h"
#include <cstdio>
#include <mpi.h>
#include <stdexcept>

using namespace nvlink;
using oracle::Bytes;

namespace {

constexpr double SECONDS = 30; // the deadline of every wait
constexpr double SHORT_SECONDS = 3; // the same for a rank that never comes. Other ranks come within it
constexpr int64_t HALF_BYTES = 96 << 20;
constexpr int64_t HOP_BYTES = 32 << 20; // of a half of a hop's staging
constexpr uint8_t POISON = 0x5A; // of outputs, before a kernel writes them
const float POISONED = oracle::from_bits(0x5A5A5A5Au);
constexpr int64_t MARGIN = 8; // rows behind each output, which must stay as they are
constexpr int SMS[] = {24, 3, 1}; // multiprocessors for the exchanges of a case, in turn

// The first error of a case on this rank. The case goes on, since peers wait for this rank's part.
class Errors {
public:
  void note(const std::string &where, const std::string &what) {
    if (first.empty() && !what.empty())
      first = where + ": " + what;
  }
  template <class T> void equal(const std::string &where, const T &want, const T &got) {
    if (want != got)
      note(where, "expected " + std::to_string(want) + ", got " + std::to_string(got));
  }
  void equal(const std::string &where, const std::vector<int> &want, const std::vector<int> &got) {
    for (size_t i = 0; i < want.size(); i++)
      equal(where + " of expert " + std::to_string(i), want[i], got.at(i));
  }
  void equal(const std::string &where, const std::vector<float> &want, const std::vector<float> &got) {
    note(where, oracle::first_difference(FP32, bytes(want), bytes(got), 1));
  }

  std::string first;

private:
  static Bytes bytes(const std::vector<float> &values) {
    Bytes all(4 * values.size());
    if (!values.empty())
      std::memcpy(all.data(), values.data(), all.size());
    return all;
  }
};

struct Case {
  const char *name;
  oracle::Shape s;
  Routing routing = RANDOM;
  std::vector<int64_t> tokens = {37, 13, 0, 50, 5, 64, 1, 70}; // of up to eight ranks
  bool weights = true;
  bool drop = false;
  bool large = false;
};

const Case CASES[] = {
    {"random", {.K = 2, .E = 3, .H = 96}},
    {"blocks of 32", {.K = 3, .E = 3, .H = 96, .block = 32}},
    {"blocks of 128", {.K = 3, .E = 3, .H = 96, .block = 128}},
    {"floor", {.K = 2, .E = 3, .H = 64, .dtype = FP16, .y_dtype = FP16, .block = 32, .floor = true}},
    {"floor, blocks of 128", {.K = 2, .E = 3, .H = 544, .dtype = FP32, .block = 128, .floor = true}},
    {"skewed", {.K = 3, .E = 3, .H = 160, .block = 128}, SKEWED},
    {"dropped", {.K = 5, .E = 3, .H = 512, .block = 32}, DROPPED},
    {"dropped, plain", {.K = 4, .E = 3, .H = 1056}, DROPPED},
    {"one hot expert", {.K = 2, .E = 3, .H = 32, .block = 128}, ONE_EXPERT},
    {"all to one rank", {.K = 2, .E = 3, .H = 96, .block = 32}, ONE_RANK},
    {"no choice has an expert", {.K = 2, .E = 3, .H = 96, .block = 128}, NOWHERE},
    {"nobody has tokens", {.K = 2, .E = 3, .H = 96, .block = 128}, RANDOM, std::vector<int64_t>(8)},
    {"one rank has tokens", {.K = 2, .E = 3, .H = 96}, RANDOM, {0, 77, 0, 0, 0, 0, 0, 0}},
    {"one token each", {.K = 1, .E = 1, .H = 96, .block = 32}, RANDOM, std::vector<int64_t>(8, 1)},
    {"one choice a token", {.K = 1, .E = 3, .H = 2336}},
    {"one choice a token, blocks of 32", {.K = 1, .E = 3, .H = 1568, .block = 32}, RANDOM, {9, 4, 3, 2, 0, 1, 5, 7}},
    {"more choices than experts", {.K = 8, .E = 1, .H = 64, .block = 128}},
    {"more rows than a tile", {.K = 2, .E = 1, .H = 32, .block = 128}, RANDOM, {150, 1, 2, 140, 0, 0, 9, 150}},
    {"many experts", {.K = 8, .E = 40, .H = 64}},
    {"many scales", {.K = 6, .E = 3, .H = 1056, .dtype = FP16, .block = 32}, RANDOM, {9, 4, 3, 2, 0, 1, 5, 7}},
    {"float32", {.K = 2, .E = 3, .H = 544, .dtype = FP32, .y_dtype = FP32}},
    {"float32 answers", {.K = 4, .E = 3, .H = 96, .y_dtype = FP32, .block = 128}},
    {"no weights", {.K = 2, .E = 3, .H = 96, .block = 32}, RANDOM, {37, 13, 0, 50, 5, 64, 1, 70}, false},
    {"capacity", {.K = 2, .E = 3, .H = 96, .block = 128, .room = 4096}, RANDOM, std::vector<int64_t>(8, 50)},
    {"capacity, dropping", {.K = 2, .E = 3, .H = 64, .block = 32, .room = 256}, ONE_RANK,
     std::vector<int64_t>(8, 150), true, true},
    {"capacity, one hot expert, dropping", {.K = 2, .E = 3, .H = 64, .room = 384}, ONE_EXPERT,
     std::vector<int64_t>(8, 130), true, true},
    {"hidden 7168", {.K = 8, .E = 8, .H = 7168, .block = 128}, DISTINCT, {37, 13, 0, 50, 5, 64, 1, 70}, true, false,
     true},
    {"hidden 7168, plain", {.K = 8, .E = 8, .H = 7168}, DISTINCT, {37, 13, 0, 50, 5, 64, 1, 70}, true, false, true},
    {"many chunks", {.K = 2, .E = 3, .H = 64, .block = 128}, RANDOM, {4097, 3000, 0, 5003, 100, 2000, 900, 4096}, true,
     false, true},
};

// Tokens of the ranks in a low-latency exchange: at most `max_tokens`, on some ranks none.
int64_t low_latency_tokens(int max_tokens, int rank) { return rank % 4 == 2 ? 0 : std::max(max_tokens - rank, 1); }

struct LowLatencyCase {
  const char *name;
  oracle::Shape s;
  Routing routing = DISTINCT;
  int max_tokens = 7;
  bool split = false;
  bool large = false;
};

const LowLatencyCase LOW_LATENCY_CASES[] = {
    {"random", {.K = 2, .E = 2, .H = 64}},
    {"blocks of 32, dropped", {.K = 2, .E = 2, .H = 160, .block = 32}, DROPPED},
    {"blocks of 128", {.K = 2, .E = 2, .H = 544, .block = 128}},
    {"float16, floor", {.K = 2, .E = 2, .H = 64, .dtype = FP16, .y_dtype = FP16, .block = 32, .floor = true}},
    {"one hot expert", {.K = 1, .E = 2, .H = 64}, ONE_EXPERT},
    {"all to one rank", {.K = 3, .E = 4, .H = 64}, ONE_RANK},
    {"no choice has an expert", {.K = 2, .E = 2, .H = 64, .block = 128}, NOWHERE},
    {"float32 answers", {.K = 4, .E = 4, .H = 64, .y_dtype = FP32}, DISTINCT, 19},
    {"sent, then received", {.K = 2, .E = 2, .H = 1056, .dtype = FP16, .y_dtype = FP16}, DISTINCT, 7, true},
    {"many experts", {.K = 8, .E = 8, .H = 64}, DISTINCT, 1},
    {"more tokens than blocks", {.K = 6, .E = 3, .H = 32}, DISTINCT, 40},
    {"hidden 7168", {.K = 8, .E = 16, .H = 7168, .block = 128}, DISTINCT, 128, false, true},
};

class Suite {
public:
  Suite(Ranks &ranks, bool small, std::string part) : ranks(ranks), small(small), part(std::move(part)) {}

  // Returns whether all cases passed.
  bool run() {
    for (const Case &c : CASES)
      if (!one("dispatch and combine", c.name, c.large, [&](Errors &errors) { flat(c, errors); }))
        return false;
    for (const LowLatencyCase &c : LOW_LATENCY_CASES)
      if (!one("low latency", c.name, c.large, [&](Errors &errors) { low_latency(c, errors); }))
        return false;
    for (int node_size = 1; node_size < ranks.world; node_size++)
      if (ranks.world % node_size == 0 && !two_hops(node_size))
        return false;
    const int last = ranks.world - 1;
    return fault("a rank that stays away", ranks, SHORT_SECONDS, TIMEOUT, last, [&] {
             if (ranks.rank != last)
               plan(2, 0);
           }) &&
           fault("a rank with other shapes", ranks, SECONDS, MISMATCH, 0, [&] { plan(ranks.rank ? 2 : 3, 0); }) &&
           fault("more rows than fit", ranks, SECONDS, OVERFLOW, 0, [&] { plan(2, 128); });
  }
  int passed = 0;

private:
  template <class Check> bool one(const char *group, const char *name, bool large, Check check) {
    if ((small && large) || std::string(name).find(part) == std::string::npos)
      return true;
    Errors errors;
    sms = std::min(SMS[passed % std::size(SMS)], device::multiprocessors());
    const double start = MPI_Wtime();
    try {
      check(errors);
    } catch (const std::exception &error) {
      errors.note("stopped", error.what());
    }
    const std::string first =
        ranks.first_error(errors.first.empty() ? "" : "rank " + std::to_string(ranks.rank) + ": " + errors.first);
    if (ranks.rank == 0) {
      std::printf("%-22s %-38s %-6s %8.1f ms\n", group, name, first.empty() ? "ok" : "WRONG",
                  1000 * (MPI_Wtime() - start));
      std::fflush(stdout);
      if (!first.empty())
        std::fprintf(stderr, "test_all_to_all: %s, case \"%s\": %s\n", group, name, first.c_str());
    }
    passed += first.empty();
    return first.empty();
  }

  // What the experts of rank w answer. Values may be special, numbers are not.
  static float answer(const oracle::Shape &s, int w, int64_t p, int h) {
    return oracle::rounded(s.y_dtype, Noise{uint64_t(w) + 400}.value(p * s.H + h, true));
  }
  static float number(int w, int64_t p) { return Noise{uint64_t(w) + 500}.value(p, false); }

  // The answers of this rank's experts, whose groups of `size_E` rows begin at multiples of `alignment` rows, or
  // `alignment` rows apart if `apart` is true. All other rows are NaN.
  Bytes answers(const oracle::Shape &s, const int *size_E, int64_t alignment, bool apart, int64_t rows) const {
    Bytes y(rows * s.H * oracle::bytes_of(s.y_dtype));
    for (int64_t i = 0; i < rows * s.H; i++)
      oracle::store(s.y_dtype, y.data(), i, NAN);
    int64_t begin = 0;
    for (int e = 0; e < s.E; e++) {
      for (int64_t p = begin; p < begin + size_E[e]; p++)
        for (int h = 0; h < s.H; h++)
          oracle::store(s.y_dtype, y.data(), p * s.H + h, answer(s, ranks.rank, p, h));
      begin += apart ? alignment : (size_E[e] + alignment - 1) / alignment * alignment;
    }
    return y;
  }

  void flat(const Case &c, Errors &errors) {
    const Transport transport(ranks, sms);
    exchange(c, 1, transport, [&](const device::Array<int64_t> &ids, int64_t T) {
      return transport.plan(ids, T, c.s.K, c.s.E, c.s.room, c.drop ? dropped : nullptr);
    }, errors);
  }

  // All cases without a capacity, which two hops do not have. Returns whether they passed.
  bool two_hops(int node_size) {
    Hops hops(ranks, node_size, HOP_BYTES);
    const std::string group = "nodes of " + std::to_string(node_size);
    for (const Case &c : CASES)
      if (c.s.room == 0 && !one(group.c_str(), c.name, c.large, [&](Errors &errors) {
            const TwoHops transport(hops, sms);
            exchange(c, node_size, transport, [&](const device::Array<int64_t> &ids, int64_t T) {
              return transport.plan(ids, T, c.s.K, c.s.E);
            }, errors);
          }))
        return false;
    return one_stays_away(hops);
  }

  // The last rank stays away from the hop between nodes. In the other hop, those that waited for it then do nothing.
  bool one_stays_away(Hops &hops) {
    const int last = ranks.world - 1;
    const auto one_row_each = [&](const Ranks &hop, const Ranks &other) {
      const std::vector<int64_t> ones(hop.world, 1);
      const RowsOfHop exchange(hop, other, Bytes(16 * hop.world), 16, ones, ones, 1);
      exchange.launch(sms);
      return exchange.arrived();
    };
    return fault("a rank that stays away from a hop", hops.between, SHORT_SECONDS, TIMEOUT, last, [&] {
      if (ranks.rank == last)
        return;
      try {
        one_row_each(hops.between, hops.inside);
      } catch (const std::exception &) {
        if (one_row_each(hops.inside, hops.between) != Bytes(16 * hops.node_size, RowsOfHop::UNWRITTEN))
          throw std::runtime_error("a hop went on after the other one failed");
        throw;
      }
    });
  }

  // `plan_of`: takes the ids of experts and T.
  template <class Way, class Planner>
  void exchange(const Case &c, int node_size, const Way &transport, Planner plan_of, Errors &errors) {
    const oracle::Shape &s = c.s;
    const int W = ranks.world, me = ranks.rank;
    std::vector<oracle::Inputs> all;
    for (int w = 0; w < W; w++)
      all.push_back(inputs(c.routing, s, c.tokens[w], w, W, true));
    const oracle::Inputs &mine = all[me];
    const oracle::Places places = oracle::find_places(all, s);

    const Wire wire{s.H, s.dtype, s.block, s.floor};
    const device::Array<int64_t> ids(mine.expert_TK);
    const device::Array<uint8_t> x_TH(mine.x_TH);
    const device::Array<float> weight_TK(mine.weight_TK);
    *dropped = 0;
    const auto plan = plan_of(ids, mine.T);
    ranks.wait("places");
    const int64_t end = places.end_W[me], P = plan.P;
    const std::vector<int> sizes(places.size_E.begin() + me * s.E, places.size_E.begin() + (me + 1) * s.E);
    errors.equal("group_sizes", sizes, plan.group_sizes_E.values());
    errors.equal("the last group's end", int(end), plan.group_ends_E.values().back());
    if (s.room == 0)
      errors.equal("rows", end, P);
    errors.equal("dropped choices", c.drop ? places.dropped_W[me] : 0, *dropped);

    const int64_t row_bytes = s.block ? s.H : s.H * oracle::bytes_of(s.dtype);
    const int64_t blocks = s.block ? (s.H + s.block - 1) / s.block : 0;
    oracle::Dispatched want = oracle::dispatch(all, s, places, me, P);
    for (auto [bytes, columns] : {std::pair(&want.out_PH, row_bytes), std::pair(&want.scale_PB, blocks)}) {
      bytes->resize(end * columns);
      bytes->resize((P + MARGIN) * columns, POISON);
    }
    want.weight_P.resize(P + MARGIN, POISONED);
    for (int turn = 0; turn < 2; turn++) { // so that each half of the staging serves
      device::Array<uint8_t> out_PH((P + MARGIN) * row_bytes), out_scale((P + MARGIN) * blocks);
      device::Array<float> out_weight_P(P + MARGIN);
      out_PH.fill(POISON);
      out_scale.fill(POISON);
      out_weight_P.fill(POISON);
      transport.dispatch(plan, wire, x_TH, weight_TK, out_PH, out_scale, out_weight_P, c.weights);
      ranks.wait("dispatch");
      errors.note("dispatch", oracle::first_difference(want.out_PH, out_PH.values(), row_bytes));
      if (blocks)
        errors.note("dispatch, scales", oracle::first_difference(want.scale_PB, out_scale.values(), blocks));
      if (c.weights)
        errors.equal("dispatch, weights", want.weight_P, out_weight_P.values());
    }

    std::vector<float> numbers(P, NAN);
    for (int64_t p = 0; p < P; p++)
      numbers[p] = number(me, p);
    const device::Array<uint8_t> y_PH(answers(s, sizes.data(), ROW_ALIGNMENT, false, P));
    const device::Array<float> weight_P(numbers);
    device::Array<uint8_t> out_TH((mine.T + MARGIN) * s.H * oracle::bytes_of(s.dtype));
    device::Array<float> out_weight_TK((mine.T + MARGIN) * s.K);
    out_TH.fill(POISON);
    out_weight_TK.fill(POISON);
    transport.combine(plan, wire, s.y_dtype, y_PH, weight_P, out_TH, out_weight_TK, c.weights);
    ranks.wait("combine");
    oracle::Combined back = oracle::combine(
        all, s, places, me, [&](int w, int64_t p, int h) { return answer(s, w, p, h); }, number, node_size);
    back.out_TH.resize((mine.T + MARGIN) * s.H * oracle::bytes_of(s.dtype), POISON);
    back.weight_TK.resize((mine.T + MARGIN) * s.K, POISONED);
    errors.note("combine", oracle::first_difference(s.dtype, back.out_TH, out_TH.values(), s.H));
    if (c.weights)
      errors.equal("combine, weights", back.weight_TK, out_weight_TK.values());
  }

  void low_latency(const LowLatencyCase &c, Errors &errors) {
    const oracle::Shape &s = c.s;
    const int W = ranks.world, me = ranks.rank;
    std::vector<oracle::Inputs> all;
    for (int w = 0; w < W; w++)
      all.push_back(inputs(c.routing, s, low_latency_tokens(c.max_tokens, w), w, W, true));
    const oracle::Inputs &mine = all[me];

    const LowLatencyExchange exchange(ranks, sms, c.max_tokens, s.K, s.E, {s.H, s.dtype, s.block, s.floor});
    const int64_t rows = exchange.rows(), row_bytes = s.block ? s.H : s.H * oracle::bytes_of(s.dtype);
    const int64_t blocks = s.block ? (s.H + s.block - 1) / s.block : 0;
    const device::Array<int64_t> ids(mine.expert_TK);
    const device::Array<uint8_t> x_TH(mine.x_TH);
    const device::Array<float> weight_TK(mine.weight_TK);
    oracle::LowLatencyDispatched want = oracle::low_latency_dispatch(all, s, me, rows, POISON);
    want.out_ERH.resize((s.E * rows + MARGIN) * row_bytes, POISON);
    want.scale_ERB.resize((s.E * rows + MARGIN) * blocks, POISON);
    for (int turn = 0; turn < 2; turn++) {
      device::Array<int> out_count_E(s.E);
      device::Array<uint8_t> out_ERH((s.E * rows + MARGIN) * row_bytes);
      device::Array<uint8_t> out_scale((s.E * rows + MARGIN) * blocks);
      out_count_E.fill(POISON);
      out_ERH.fill(POISON);
      out_scale.fill(POISON);
      exchange.dispatch(ids, mine.T, x_TH, out_count_E, out_ERH, out_scale, c.split);
      ranks.wait("dispatch");
      errors.equal("rows", want.count_E, out_count_E.values());
      errors.note("dispatch", oracle::first_difference(want.out_ERH, out_ERH.values(), row_bytes));
      if (blocks)
        errors.note("dispatch, scales", oracle::first_difference(want.scale_ERB, out_scale.values(), blocks));
    }
    const device::Array<uint8_t> y_ERH(answers(s, want.count_E.data(), rows, true, s.E * rows));
    device::Array<uint8_t> out_TH((mine.T + MARGIN) * s.H * oracle::bytes_of(s.dtype));
    out_TH.fill(POISON);
    exchange.combine(ids, mine.T, weight_TK, s.y_dtype, y_ERH, out_TH, c.split);
    ranks.wait("combine");
    Bytes back = oracle::low_latency_combine(all, s, me, rows,
                                             [&](int w, int64_t p, int h) { return answer(s, w, p, h); });
    back.resize((mine.T + MARGIN) * s.H * oracle::bytes_of(s.dtype), POISON);
    errors.note("combine", oracle::first_difference(s.dtype, back, out_TH.values(), s.H));
  }

  // This rank's part of the exchange of counts and places, of tokens that all go to rank 0.
  void plan(int K, int64_t room) const {
    const device::Array<int64_t> ids(std::vector<int64_t>(64 * K));
    Transport(ranks, sms).plan(ids, 64, K, 1, room);
    ranks.wait("places");
  }

  // A case in which `body` must fail on every rank of `group`: with this code, and by this peer on all other ranks. A
  // rank that others wait for fails in nothing. Groups without the peer do not fail.
  template <class Body>
  bool fault(const char *name, Ranks &group, double seconds, Code code, int peer, Body body) {
    return one("faults", name, false, [&](Errors &errors) {
      group.seconds = seconds;
      std::string said;
      try {
        body();
      } catch (const std::exception &error) {
        said = error.what();
      }
      const nvlink::Failure recorded = *group.failure;
      group.seconds = SECONDS;
      group.restart(100);
      const bool fails = std::count(group.ids.begin(), group.ids.end(), peer) > 0;
      if (!fails || (code == TIMEOUT && ranks.rank == peer)) {
        errors.note("the error", said);
        return;
      }
      errors.equal("the failure's code", uint32_t(code), recorded.code);
      if (ranks.rank != peer || code == OVERFLOW)
        errors.equal("the failure's peer", peer, group.ids.at(recorded.peer));
      if (said != group.described(recorded))
        errors.note("the error", said);
    });
  }

  Ranks &ranks;
  const bool small;
  const std::string part;
  int64_t *const dropped = static_cast<int64_t *>(device::allocate_host(sizeof(int64_t)));
  int sms = 1;
};

int run(int argc, char **argv) {
  bool small = false;
  std::string part;
  for (int i = 1; i < argc; i++)
    if (std::string(argv[i]) == "--small")
      small = true;
    else
      part = argv[i];
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    Ranks ranks(HALF_BYTES, SECONDS);
    if (rank == 0)
      std::printf("%d ranks, %d on a device: %s\n", ranks.world, ranks.sharing, device::name().c_str());
    Suite suite(ranks, small, part);
    if (!suite.run())
      return 1;
    if (suite.passed == 0)
      throw std::runtime_error("no case has '" + part + "' in its name");
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
