// SPDX-License-Identifier: Apache-2.0
// Times the exchanges between ranks that MPI starts.
//
//   mpirun -np 4 ./bench_all_to_all [--hidden 7168] [--experts 64] [--top-k 8] [--iterations 50]
//
// --experts: of each rank. Tokens go to random experts. Rows travel to experts in MXFP8 with blocks of 128, and back
// in bf16. A time is that of one kernel by the device's clock. It includes the wait for the slowest rank. p50 and p90
// are over the iterations, of the rank where they are largest. bytes: what the rank with the most sends to other ranks
// in a dispatch, and receives from them in a combine. GB/s: these bytes by p50.
#include "exchange.h"
#include "oracle.h"
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mpi.h>
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

class Bench {
public:
  Bench(const Ranks &ranks, const Options &o) : ranks(ranks), o(o), sms(std::min(SMS, multiprocessors())) {
    if (ranks.rank == 0)
      std::printf("%-24s %8s %12s %10s %10s %8s\n", "kernel", "tokens", "bytes", "p50 us", "p90 us", "GB/s");
  }

  void exchange(int64_t T) const {
    const oracle::Inputs in = inputs(T);
    const Array<int64_t> ids(in.expert_TK);
    const Array<float> weight_TK(in.weight_TK);
    const Shape to = shape(BLOCK), back = shape(0);
    const Transport there(ranks, sms, to), here(ranks, sms, back);
    const Plan plan = there.plan(ids, T);
    const Array<uint8_t> x_TH = zeros(T * back.row_bytes()), y_PH = zeros(plan.P * back.row_bytes());
    const Array<uint8_t> out_TH(T * back.row_bytes()), out_PH(plan.P * o.hidden);
    const Array<uint8_t> out_scale(plan.P * to.blocks());
    const Array<float> weight_P(plan.P), out_weight_TK(T * o.top_k);
    const int64_t rows = others(in, true);
    measure(T, {"dispatch", "combine"}, {rows * to_bytes(), rows * (back.row_bytes() + 4 * o.top_k)},
            [&] { there.dispatch(plan, x_TH, weight_TK, out_PH, out_scale, weight_P); },
            [&] { here.combine(plan, y_PH, weight_P, out_TH, out_weight_TK); });
  }

  void low_latency(int64_t T) const {
    const oracle::Inputs in = inputs(T);
    const Shape s = shape(BLOCK);
    const LowLatencyExchange exchange(ranks, sms, int(T), s);
    const int64_t rows = o.experts * exchange.rows(), row_bytes = 2ll * o.hidden;
    const Array<int64_t> ids(in.expert_TK);
    const Array<float> weight_TK(in.weight_TK);
    const Array<uint8_t> x_TH = zeros(T * row_bytes), y_ERH = zeros(rows * row_bytes);
    const Array<uint8_t> out_TH(T * row_bytes), out_ERH(rows * o.hidden), out_scale(rows * s.blocks());
    const Array<int> out_count_E(o.experts);
    measure(T, {"low-latency dispatch", "low-latency combine"},
            {others(in, true) * to_bytes(), others(in, false) * row_bytes},
            [&] { exchange.dispatch(ids, T, x_TH, out_count_E, out_ERH, out_scale); },
            [&] { exchange.combine(ids, T, weight_TK, y_ERH, out_TH); });
  }

private:
  Shape shape(int block) const { return {.K = o.top_k, .E = o.experts, .H = o.hidden, .block = block}; }
  oracle::Inputs inputs(int64_t T) const {
    return oracle::inputs(oracle::DISTINCT, {.K = o.top_k, .E = o.experts}, T, ranks.rank, ranks.world, false);
  }
  int64_t to_bytes() const { return o.hidden + shape(BLOCK).blocks() + 4 * o.top_k; } // of a row of dispatch

  // Choices of experts on other ranks. `once`: once for each pair of a token and a rank.
  int64_t others(const oracle::Inputs &in, bool once) const {
    int64_t found = 0;
    for (int64_t t = 0; t < in.T; t++)
      for (int w = 0; w < ranks.world; w++)
        if (w != ranks.rank) {
          const auto first = in.expert_TK.begin() + t * o.top_k;
          const int64_t choices = std::count_if(first, first + o.top_k, [&](int64_t e) { return e / o.experts == w; });
          found += once ? choices > 0 : choices;
        }
    return found;
  }

  static Array<uint8_t> zeros(int64_t bytes) {
    Array<uint8_t> made(bytes);
    made.fill(0);
    return made;
  }

  // Two kernels in turn. `names` and `bytes` have an entry for each.
  template <class First, class Second>
  void measure(int64_t T, std::array<const char *, 2> names, std::array<int64_t, 2> bytes, First first,
               Second second) const {
    std::vector<cudaEvent_t> marks(3 * o.iterations);
    for (cudaEvent_t &mark : marks)
      check(cudaEventCreate(&mark), "cudaEventCreate");
    for (int i = -WARM_UP; i < o.iterations; i++) {
      const auto *mark = &marks[3 * std::max(i, 0)];
      check(cudaEventRecord(mark[0], stream), "cudaEventRecord");
      first();
      check(cudaEventRecord(mark[1], stream), "cudaEventRecord");
      second();
      check(cudaEventRecord(mark[2], stream), "cudaEventRecord");
    }
    ranks.wait(names[1]);
    for (int which = 0; which < 2; which++) {
      std::vector<double> times;
      for (int i = 0; i < o.iterations; i++) {
        float ms;
        check(cudaEventElapsedTime(&ms, marks[3 * i + which], marks[3 * i + which + 1]), "cudaEventElapsedTime");
        times.push_back(1000.0 * ms);
      }
      std::sort(times.begin(), times.end());
      const double p50 = ranks.largest(times[times.size() / 2]), p90 = ranks.largest(times[times.size() * 9 / 10]);
      const double most = ranks.largest(double(bytes[which]));
      if (ranks.rank == 0)
        std::printf("%-24s %8lld %12.0f %10.1f %10.1f %8.1f\n", names[which], static_cast<long long>(T), most, p50,
                    p90, most / p50 / 1e3);
    }
    for (cudaEvent_t mark : marks)
      cudaEventDestroy(mark);
    std::fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
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

void run(const Options &o) {
  int world;
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  // A half has room for all tokens of all ranks in bf16.
  const int64_t most_tokens = world * *std::max_element(std::begin(TOKENS), std::end(TOKENS));
  const Ranks ranks(most_tokens * (2 * o.hidden + 4 * o.top_k) + (1 << 20), SECONDS);
  if (ranks.rank == 0) {
    std::printf("%d ranks, %d on a device: %s. hidden %d, %d experts a rank, top-%d, %d iterations\n", world,
                ranks.sharing, ranks.device_name.c_str(), o.hidden, o.experts, o.top_k, o.iterations);
    if (ranks.sharing > 1)
      std::printf("Ranks share a device. Without CUDA MPS they run in turn, and these times are those of the turns. "
                  "With it, GB/s are those of the device's memory.\n");
  }
  const Bench bench(ranks, o);
  for (int64_t tokens : TOKENS)
    bench.exchange(tokens);
  for (int64_t tokens : LOW_LATENCY_TOKENS)
    bench.low_latency(tokens);
}

} // namespace

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  try {
    run(parsed(argc, argv));
  } catch (const std::exception &error) {
    std::fprintf(stderr, "bench_all_to_all: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1); // the other ranks may be in an exchange
  }
  MPI_Finalize();
}
