// Rate of oneDNN's f32 matrix product on the shapes of the benchmark's training step: the ceiling of the step time.
//
//   matmul_rate ROWS HIDDEN FFN VOCAB   prints one JSON object, GFLOP/s by product and their weighted mean
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dnnl.h"

namespace {

struct Product {
  const char* name;
  dnnl_dim_t m, n, k;
  int count;  // Times a layer or a step, forward and both gradients.
  char transpose_a, transpose_b;
};

double Seconds(const Product& p) {
  std::vector<float> a(p.m * p.k, 0.5f), b(p.k * p.n, 0.25f), c(p.m * p.n);
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const dnnl_status_t status =
        dnnl_sgemm(p.transpose_a, p.transpose_b, p.m, p.n, p.k, 1.0f, a.data(), p.transpose_a == 'N' ? p.k : p.m, b.data(),
                   p.transpose_b == 'N' ? p.n : p.k, 0.0f, c.data(), p.n);
    if (status != dnnl_success) std::abort();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (elapsed.count() < best) best = elapsed.count();
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: matmul_rate ROWS HIDDEN FFN VOCAB\n");
    return 2;
  }
  const dnnl_dim_t rows = std::atoll(argv[1]), hidden = std::atoll(argv[2]), ffn = std::atoll(argv[3]),
                   vocab = std::atoll(argv[4]);
  const Product products[] = {
      {"qkv", rows, 3 * hidden, hidden, 2, 'N', 'T'},
      {"proj", rows, hidden, hidden, 2, 'N', 'T'},
      {"fc1", rows, ffn, hidden, 2, 'N', 'T'},
      {"fc2", rows, hidden, ffn, 2, 'N', 'T'},
      {"logits", rows, vocab, hidden, 1, 'N', 'T'},
      {"logits_dgrad", rows, hidden, vocab, 1, 'N', 'N'},
      {"logits_wgrad", vocab, hidden, rows, 1, 'T', 'N'},
  };
  double flops = 0, seconds = 0;
  std::printf("{");
  for (const Product& p : products) {
    const double time = Seconds(p), work = 2.0 * p.m * p.n * p.k;
    std::printf("\"%s\": %.1f, ", p.name, work / time / 1e9);
    flops += work * p.count;
    seconds += time * p.count;
  }
  std::printf("\"mean\": %.1f}\n", flops / seconds / 1e9);
  return 0;
}
