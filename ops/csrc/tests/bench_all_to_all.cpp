// SPDX-License-Identifier: Apache-2.0
// Times the exchanges between ranks that MPI starts.
//
//   mpirun -np 4 ./bench_all_to_all [--hidden 7168] [--experts 64] [--top-k 8] [--iterations 50]
//
// --experts: of each rank. Tokens go to random experts. Rows travel to experts in MXFP8 with blocks of 128, and back
// in bf16. Two nodes of half the ranks each exchange the same rows in two hops, with sums in float32 inside a node. A
// time is that of one kernel by the device's clock. It includes the wait for the slowest rank. p50 and p90 are over
// the iterations, of the rank where they are largest. GB/s: the bytes that the rank with the most sends to other
// ranks, by p50.
#include "cases.h"
#include "two_hops.h"
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mpi.h>
#include <numeric>
#include <optional>
#include <stdexcept>

namespace {

constexpr double SECONDS = 30; // the deadline of every wait
constexpr int WARM_UP = 5;
constexpr int64_t TOKENS[] = {64, 256, 1024, 4096}; // of each rank
constexpr int64_t LOW_LATENCY_TOKENS[] = {1, 8, 32, 128};
constexpr int SMS = 128; // multiprocessors for an exchange, as in Python
constexpr int BLOCK = 128;

struct Options {
  int hidden = 7168, experts = 64, top_k = 8, iterations = 50;
};

// The routing of `tokens` tokens on each rank.
struct Traffic {
  oracle::Inputs mine;
  int64_t sent = 0, received = 0; // tokens that this rank sends to others and receives, once for each pair of ranks
  int64_t received_choices = 0;   // choices of other ranks for this rank's experts

  Traffic(const Ranks &ranks, const Options &o, int64_t tokens) {
    const auto tell = [&](const std::vector<int64_t> &expert_TK, int64_t t, int w) {
      return std::count_if(expert_TK.begin() + t * o.top_k, expert_TK.begin() + (t + 1) * o.top_k,
                           [&](int64_t e) { return e / o.experts == w; });
    };
    for (int r = 0; r < ranks.world; r++) {
      const oracle::Inputs in = inputs(DISTINCT, {.K = o.top_k, .E = o.experts}, tokens, r, ranks.world, false);
      for (int64_t t = 0; t < tokens; t++)
        for (int w = 0; w < ranks.world; w++)
          if (const int64_t choices = tell(in.expert_TK, t, w); choices && w != r) {
            sent += r == ranks.rank;
            received += w == ranks.rank;
            received_choices += w == ranks.rank ? choices : 0;
          }
      if (r == ranks.rank)
        mine = in;
    }
  }
};

class Bench {
public:
  Bench(const Ranks &ranks, const Options &o) : ranks(ranks), o(o), sms(std::min(SMS, device::multiprocessors())) {
    if (ranks.rank == 0)
      std::printf("%-24s %8s %12s %10s %10s %8s\n", "kernel", "tokens", "bytes sent", "p50 us", "p90 us", "GB/s");
  }

  void exchange(int64_t T) const {
    const Traffic traffic(ranks, o, T);
    const device::Array<int64_t> ids(traffic.mine.expert_TK);
    const device::Array<float> weight_TK(traffic.mine.weight_TK);
    const Transport transport(ranks, sms);
    const Plan plan = transport.plan(ids, T, o.top_k, o.experts);
    const device::Array<uint8_t> x_TH = zeros(T * row_bytes()), y_PH = zeros(plan.P * row_bytes());
    const device::Array<uint8_t> out_TH(T * row_bytes()), out_PH(plan.P * o.hidden), out_scale(plan.P * blocks());
    const device::Array<float> weight_P(plan.P), out_weight_TK(T * o.top_k);
    measure(T, {"dispatch", "combine"},
            {traffic.sent * (o.hidden + blocks() + 4 * o.top_k), traffic.received * (row_bytes() + 4 * o.top_k)},
            [&] { transport.dispatch(plan, wire(BLOCK), x_TH, weight_TK, out_PH, out_scale, weight_P); },
            [&] { transport.combine(plan, wire(0), nvlink::BF16, y_PH, weight_P, out_TH, out_weight_TK); });
  }

  // The kernels of two hops. What happens between them is not timed.
  void two_hops(const Hops &hops, int64_t T) const {
    const device::Array<int64_t> ids(Traffic(ranks, o, T).mine.expert_TK);
    const TwoHopPlan plan = TwoHops(hops, sms).plan(ids, T, o.top_k, o.experts);
    const auto rows = [&](const Ranks &hop, const Ranks &other, const std::vector<int64_t> &send,
                          const std::vector<int64_t> &receive, int64_t most, const Wire &wire) {
      const int64_t row_bytes = row_bytes_of(wire, o.top_k);
      const int64_t sent = std::accumulate(send.begin(), send.end(), int64_t(0));
      return std::pair(RowsOfHop(hop, other, std::vector<uint8_t>(sent * row_bytes), row_bytes, send, receive, most),
                       (sent - send[hop.rank]) * row_bytes);
    };
    const auto both = [&](std::array<const char *, 2> names, const auto &first, const auto &second) {
      measure(T, names, {first.second, second.second}, [&] { first.first.launch(sms); },
              [&] { second.first.launch(sms); });
    };
    const Sends &b = plan.between, &i = plan.inside;
    both({"dispatch between nodes", "dispatch inside a node"},
         rows(hops.between, hops.inside, b.send_W, b.receive_W, b.most, wire(BLOCK)),
         rows(hops.inside, hops.between, i.send_W, i.receive_W, i.most, wire(BLOCK)));
    both({"combine inside a node", "combine between nodes"},
         rows(hops.inside, hops.between, i.receive_W, i.send_W, i.most, {o.hidden, nvlink::FP32}),
         rows(hops.between, hops.inside, b.receive_W, b.send_W, b.most, wire(0)));
    hops.between.wait("rows");
    hops.inside.wait("rows");
  }

  void low_latency(int64_t T) const {
    const Traffic traffic(ranks, o, T);
    const LowLatencyExchange exchange(ranks, sms, int(T), o.top_k, o.experts, wire(BLOCK));
    const int64_t rows = o.experts * exchange.rows();
    const device::Array<int64_t> ids(traffic.mine.expert_TK);
    const device::Array<float> weight_TK(traffic.mine.weight_TK);
    const device::Array<uint8_t> x_TH = zeros(T * row_bytes()), y_ERH = zeros(rows * row_bytes());
    const device::Array<uint8_t> out_TH(T * row_bytes()), out_ERH(rows * o.hidden), out_scale(rows * blocks());
    const device::Array<int> out_count_E(o.experts);
    measure(T, {"low-latency dispatch", "low-latency combine"},
            {traffic.sent * (o.hidden + blocks() + 4 * o.top_k), traffic.received_choices * row_bytes()},
            [&] { exchange.dispatch(ids, T, x_TH, out_count_E, out_ERH, out_scale); },
            [&] { exchange.combine(ids, T, weight_TK, nvlink::BF16, y_ERH, out_TH); });
  }

private:
  int64_t row_bytes() const { return 2ll * o.hidden; }
  int64_t blocks() const { return (o.hidden + BLOCK - 1) / BLOCK; }
  Wire wire(int block) const { return {o.hidden, nvlink::BF16, block}; }

  static device::Array<uint8_t> zeros(int64_t bytes) {
    device::Array<uint8_t> made(bytes);
    made.fill(0);
    return made;
  }

  // Two kernels in turn. `names` and `bytes` have an entry for each.
  template <class First, class Second>
  void measure(int64_t T, std::array<const char *, 2> names, std::array<int64_t, 2> bytes, First first,
               Second second) const {
    for (int i = -WARM_UP; i < o.iterations; i++) {
      const int mark = 3 * std::max(i, 0);
      device::mark(mark);
      first();
      device::mark(mark + 1);
      second();
      device::mark(mark + 2);
    }
    ranks.wait(names[1]);
    for (int which = 0; which < 2; which++) {
      std::vector<double> times;
      for (int i = 0; i < o.iterations; i++)
        times.push_back(device::microseconds(3 * i + which, 3 * i + which + 1));
      std::sort(times.begin(), times.end());
      const double p50 = ranks.largest(times[times.size() / 2]), p90 = ranks.largest(times[times.size() * 9 / 10]);
      const double most = ranks.largest(double(bytes[which]));
      if (ranks.rank == 0)
        std::printf("%-24s %8lld %12.0f %10.1f %10.1f %8.1f\n", names[which], static_cast<long long>(T), most, p50,
                    p90, most / p50 / 1e3);
    }
    std::fflush(stdout);
    ranks.barrier();
  }

  const Ranks &ranks;
  const Options o;
  const int sms;
};

Options parsed(int argc, char **argv) {
  Options o;
  const std::pair<std::string, int *> known[] = {
      {"--hidden", &o.hidden}, {"--experts", &o.experts}, {"--top-k", &o.top_k}, {"--iterations", &o.iterations}};
  for (int i = 1; i < argc; i += 2) {
    const auto found = std::find_if(std::begin(known), std::end(known), [&](auto &k) { return k.first == argv[i]; });
    const int value = i + 1 < argc ? std::atoi(argv[i + 1]) : 0;
    if (found == std::end(known) || value < 1)
      throw std::runtime_error(std::string(argv[i]) +
                               ": expected --hidden, --experts, --top-k or --iterations, and a positive number");
    *found->second = value;
  }
  if (o.hidden % 32 || o.top_k > nvlink::MAX_CHOICES)
    throw std::runtime_error("--hidden " + std::to_string(o.hidden) + " --top-k " + std::to_string(o.top_k) +
                             ": expected a multiple of 32, and at most " + std::to_string(nvlink::MAX_CHOICES));
  return o;
}

// Of a half, for the largest rows of `data_bytes`, if each rank gets all tokens.
int64_t staging_bytes(int64_t data_bytes, const Options &o, int world) {
  const int64_t most_tokens = *std::max_element(std::begin(TOKENS), std::end(TOKENS));
  return most_tokens * world * (data_bytes + 4 * o.top_k) + (1 << 20);
}

int run(int argc, char **argv) {
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  Options o;
  std::optional<Ranks> ranks;
  try {
    o = parsed(argc, argv);
    ranks.emplace(staging_bytes(2 * o.hidden, o, world), SECONDS);
  } catch (const std::exception &error) { // the same on all ranks
    if (rank == 0)
      std::fprintf(stderr, "bench_all_to_all: %s\n", error.what());
    return 1;
  }
  try {
    if (rank == 0) {
      std::printf("%d ranks, %d on a device: %s. hidden %d, %d experts a rank, top-%d, %d iterations\n", world,
                  ranks->sharing, device::name().c_str(), o.hidden, o.experts, o.top_k, o.iterations);
      if (ranks->sharing > 1)
        std::printf("Ranks share a device. Without CUDA MPS they run in turn, and these times are those of the turns. "
                    "With it, GB/s are those of the device's memory.\n");
    }
    const Bench bench(*ranks, o);
    for (int64_t tokens : TOKENS)
      bench.exchange(tokens);
    if (ranks->world % 2 == 0) {
      const Hops hops(*ranks, ranks->world / 2, staging_bytes(4 * o.hidden, o, ranks->world));
      for (int64_t tokens : TOKENS)
        bench.two_hops(hops, tokens);
    }
    for (int64_t tokens : LOW_LATENCY_TOKENS)
      bench.low_latency(tokens);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "bench_all_to_all: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1); // the other ranks may be in an exchange
  }
  return 0;
}

} // namespace

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  const int status = run(argc, argv);
  MPI_Finalize();
  return status;
}
