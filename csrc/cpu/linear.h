// Linear layers: x @ weight.T + bias, with the weight packed into panels. README.md has a picture of a packed weight.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "dot.h"
#include "gate_parts.h"
#include "norm.h"
#include "thread_pool.h"
#include "tuning.h"
#include "widened_products.h"

namespace tercet {

/// Most rows of a block. Their sums with a panel are on the stack.
constexpr int64_t kMaxBlockRows = 128;

/// Products of floats that are summed before they are added to the other sums of a row. A sum of floats loses more bits
/// the longer it is. With 16-bit numbers, their own rounding is far larger than that of the sum.
constexpr int64_t kProductsOfSum = 64;

/// Numbers [begin, end) of each row of x.
struct Chunk {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// Adds sums of a piece to those in memory, or, without kAdd, overwrites them.
template <bool kAdd, int kSums>
inline void add_part(RowSums* sums, const Floats (&part)[kSums][2]) {
  for (int i = 0; i < kSums; ++i)
    for (int side = 0; side < 2; ++side) sums[i][side] = kAdd ? sums[i][side] + part[i][side] : part[i][side];
  // Sums of two kinds do not fit into the registers. GCC keeps those in memory only if it has to.
  asm volatile("" ::: "memory");
}

/// Sums in memory begin at zero.
template <int kSums>
inline void begin_sums(RowSums* sums) {
  // For a memset, GCC sets the array by an instruction that takes 100 cycles and more.
  unrolled<2 * kSums>([&](auto i) { sums[i / 2][i % 2] = Floats{}; });
  asm volatile("" ::: "memory");
}

/// Memory of this thread for a chunk of a panel, widened to float.
inline float* chunk_of_floats() {
  alignas(64) static thread_local float floats[Tuning::kMaxChunk * kPanel];
  return floats;
}

/// sums[r * kPanels + p] += row r of x times a chunk of panel p. x: kRows rows, x_stride numbers apart. Panels are
/// panel_distance numbers apart. `numbers`: size of the chunk. is_first: the sums begin here, at zero.
template <typename D, int kRows, int kPanels = 1, typename P>
inline void multiply_chunk(
    const typename D::Row* x,
    int64_t x_stride,
    const typename D::Panel* panel,
    int64_t numbers,
    RowSums* sums,
    bool is_first,
    P prefetch,
    int64_t panel_distance = 0) {
  constexpr int64_t kPanelStride = kPanel * D::kPerWord;
  constexpr bool kInParts = std::is_same_v<typename D::Row, float>;
  const int64_t words = numbers / D::kPerWord, step = kInParts ? kProductsOfSum / D::kPerWord : words;
  if (kInParts && is_first) begin_sums<kRows * kPanels>(sums);
  auto prefetcher = prefetch.start();
  for (int64_t word = 0; word < words; word += step) {
    const int64_t count = std::min(step, words - word);
    prefetcher.begin_part(count);
#ifdef TERCET_WIDENS_IN_ASSEMBLY
    constexpr bool kInAssembly = std::is_same_v<D, Dot<at::BFloat16, float>> && std::is_same_v<P, PrefetchOfParts> &&
                                 kRows >= kMinWidenedRows;
    if constexpr (kInAssembly)
      if (count % kWidenedWords == 0) {
        add_widened_products<kRows>(x + word * D::kPerWord, x_stride, panel + word * kPanelStride, count, sums);
        continue;
      }
#endif
    Floats part[kRows * kPanels][2];
    // For `= {}` or a memcpy, GCC sets the array in memory, by an instruction that takes 100 cycles and more.
    if (kInParts || is_first)
      unrolled<2 * kRows * kPanels>([&](auto i) { part[i / 2][i % 2] = Floats{}; });
    else
      unrolled<2 * kRows * kPanels>([&](auto i) { part[i / 2][i % 2] = sums[i / 2][i % 2]; });
    multiply_panel<D, kRows, kPanels>(
        x + word * D::kPerWord,
        x_stride,
        panel + word * kPanelStride,
        kPanelStride,
        count,
        part,
        prefetcher,
        panel_distance);
    add_part<kInParts>(sums, part);
  }
}

/// A packed weight: [panels, k / kPerWord, kPanel, kPerWord], with zeros beyond the last column. k is a multiple of
/// kPerWord. X is the type of the numbers of x.
template <typename T, typename X = T>
struct Packed {
  using D = Dot<T, X>;

  const T* panels;
  /// [panels, kPanel] or nullptr
  const float* bias;
  int64_t k;

  static constexpr int64_t kMaxRows = tercet::kMaxRows;
  /// Most rows that multiply a whole panel at once. More multiply it in chunks.
  static constexpr int64_t kWholeRows = kMaxRows;
  /// Most rows that multiply several panels at once.
  static constexpr int64_t kFewRows = 2;
  /// Whether several pieces of rows prefetch before each part, as `PrefetchOfParts`. With AVX-512 it was not measured.
  static constexpr bool kPrefetchesParts = std::is_same_v<X, float> && kLanes == 8;
  /// Bytes of a row of x.
  int64_t row_bytes() const { return k * sizeof(X); }
  /// Bytes of so many numbers of all columns of a panel.
  static int64_t panel_bytes(int64_t numbers) { return kPanel * numbers * sizeof(T); }
  /// Bytes from a panel to the next.
  int64_t panel_distance() const { return panel_bytes(k); }
  static constexpr int64_t kPerWord = D::kPerWord;

  /// What `rows` rows of x are multiplied with.
  const T* open(int64_t panel, Chunk chunk, int64_t /*rows*/, Prefetch) const {
    return panels + kPanel * (panel * k + chunk.begin);
  }

  /// sums[r * kPanels + p] += the chunk of row (first + r) of x times the same of panel p, counted from the opened one.
  /// The sums begin with the first chunk, whatever they were.
  template <int kRows, int kPanels = 1, typename P>
  void multiply(const X* x, int64_t first, Chunk chunk, const T* opened, RowSums* sums, P prefetch) const {
    multiply_chunk<D, kRows, kPanels>(
        x + first * k + chunk.begin, k, opened, chunk.size(), sums, chunk.begin == 0, prefetch, kPanel * k);
  }
};

/// The packed weight that the next linear layer of a recorded step multiplies. The caches get its first panels early.
struct NextWeight {
  const char* panels = nullptr;
  int64_t panel_bytes = 0, num_panels = 0;
};

/// Threads claim the panels of a weight in runs of neighbours. The last runs, one for each thread, are halved: a thread
/// that finds none left waits half as long for the others.
class Runs {
 public:
  Runs(int64_t num_panels, int64_t threads)
      : num_panels_(num_panels),
        whole_(std::min(num_panels, std::max(kPerThread * threads, ceil_div(num_panels, kMaxLength)))) {
    if (threads > 1 && num_panels >= 2 * whole_) {
      num_halved_ = threads;
      whole_ -= threads;
    }
  }

  int64_t count() const { return whole_ + 2 * num_halved_; }

  int64_t first_panel(int64_t run) const {
    const int64_t halves = std::min(run, whole_) + run;
    return num_panels_ * halves / (2 * (whole_ + num_halved_));
  }

 private:
  static constexpr int64_t kPerThread = 3, kMaxLength = 8;

  int64_t num_panels_;
  int64_t whole_;           // runs of the usual length
  int64_t num_halved_ = 0;  // runs of this length that are halved
};

/// Panels [begin, end) of a weight, which one thread multiplies. It will probably go on at `next`.
struct Run {
  int64_t begin, end;
  const char* next;

  /// Where panel `panel` begins, or, after the last one, the next run.
  template <typename Weight>
  const char* address(const Weight& weight, int64_t panel) const {
    if (panel >= end) return next + (panel - end) * weight.panel_distance();
    return reinterpret_cast<const char*>(weight.panels) + panel * weight.panel_distance();
  }
};

/// Adds the bias to the sums of a row with a panel, and stores them.
template <typename Weight, typename Store>
inline void store_sums(const Weight& weight, int64_t row, int64_t panel, const RowSums& sums, const Store& store) {
  Floats bias[2] = {};
  if (weight.bias) {
    bias[0] = load_floats(weight.bias + panel * kPanel);
    bias[1] = load_floats(weight.bias + panel * kPanel + kLanes);
  }
  store(row, panel, to_vec(sums[0] + bias[0]), to_vec(sums[1] + bias[1]));
}

/// Multiplies kRows rows, of which `first` is the first, with a run of panels, several at once. With one panel, each
/// product would wait for the sum before it, and one stream of addresses is read more slowly than several. The processor
/// prefetches each stream, except its first lines.
template <int kRows, typename X, typename Weight, typename Store>
void multiply_few_rows(const X& x, int64_t first, const Weight& weight, const Run& run, const Store& store) {
  constexpr int64_t kPanelsAtOnce = std::min<int64_t>(4, kMaxRows / kRows), kFirstLines = 8;
  const Chunk all{0, weight.k};
  for_each_piece<kPanelsAtOnce>(run.end - run.begin, [&](int64_t at, auto panels) {
    const int64_t panel = run.begin + at;
    for (int64_t p = 0; p < panels; ++p)
      for (int64_t line = 0; line < kFirstLines; ++line)
        prefetch_line(run.address(weight, panel + panels + p) + 64 * line);
    RowSums sums[kRows * panels];
    const auto opened = weight.open(panel, all, kRows, Prefetch{});
    weight.template multiply<kRows, panels>(x, first, all, opened, sums, NoPrefetch());
    for (int64_t p = 0; p < panels; ++p) add_parts(store, first, kRows, panel + p, sums + p, panels);
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t p = 0; p < panels; ++p) store_sums(weight, first + r, panel + p, sums[r * panels + p], store);
  });
}

/// `multiply_block`, with what each piece of rows prefetches as a PrefetchOfPiece.
template <typename PrefetchOfPiece, typename X, typename Weight, typename Store>
void multiply_pieces(const X& x, int64_t first, int64_t rows, const Weight& weight, const Run& run, const Store& store) {
  const int64_t max_chunk = rows <= Weight::kWholeRows ? weight.k : Tuning::get().chunk;
  RowSums sums[kMaxBlockRows];
  for (int64_t panel = run.begin; panel < run.end; ++panel) {
    for (Chunk chunk{0, 0}; chunk.begin < weight.k; chunk.begin = chunk.end) {
      chunk.end = std::min(chunk.begin + max_chunk, weight.k);
      const char* next_chunk = run.address(weight, panel + 1) + Weight::panel_bytes(chunk.begin);
      const int64_t chunk_bytes = Weight::panel_bytes(chunk.size()), words = chunk.size() / Weight::kPerWord;
      auto opened = weight.open(panel, chunk, rows, {next_chunk, chunk_bytes / words});
      // What is prefetched for each row: bytes, and 256ths of a byte with each word. A division for each piece would take
      // as long as a dozen products.
      const int64_t bytes_per_row = ceil_div(chunk_bytes, rows), parts_per_word = 256 * chunk_bytes / (words * rows);
      for_each_piece<Weight::kMaxRows>(rows, [&](int64_t at, auto piece) {
        if (chunk.end == weight.k)
          for (int64_t r = at; r < at + piece; ++r) store.prefetch(first + r, panel);
        const PrefetchOfPiece prefetch{Prefetch{next_chunk + bytes_per_row * at, parts_per_word * piece / 256}};
        weight.template multiply<piece>(x, first + at, chunk, opened, sums + at, prefetch);
        // Each piece on its own: the stores of a whole block at once would wait for their cache lines.
        if (chunk.end == weight.k) {
          add_parts(store, first + at, piece, panel, sums + at);
          for (int64_t r = at; r < at + piece; ++r) store_sums(weight, first + r, panel, sums[r], store);
        }
      });
    }
  }
}

/// Multiplies `rows` rows, of which `first` is the first, with a run of panels. While the thread multiplies one panel, it
/// prefetches the next one, evenly over all rows, and the memory of the results.
template <typename X, typename Weight, typename Store>
void multiply_block(const X& x, int64_t first, int64_t rows, const Weight& weight, const Run& run, const Store& store) {
  if constexpr (Weight::kPrefetchesParts)
    if (rows > Weight::kMaxRows) {
      multiply_pieces<PrefetchOfParts>(x, first, rows, weight, run, store);
      return;
    }
  // A single piece prefetches a line with each word. All lines of a part at once would delay its own reads.
  multiply_pieces<Prefetch>(x, first, rows, weight, run, store);
}

/// Multiplies rows of x with all panels. Calls store(row, panel, left sums, right sums) for every row and panel, with the
/// `store` that store.for_item() gives for each item. With many rows it calls store.prefetch(row, panel) before. X is the
/// form of x that this kind of weight multiplies.
///
/// Threads claim runs of neighbouring panels, for one block of rows at a time. With few rows, memory bandwidth is the
/// limit and should never idle. So at the end of a run a thread prefetches the beginning of the run that it will
/// probably claim next. That may be one of the next weight.
template <typename X, typename Weight, typename Store>
void multiply(
    const X& x,
    int64_t rows,
    const Weight& weight,
    int64_t num_panels,
    const NextWeight& next_weight,
    const Store& store) {
  const int64_t blocks = std::min(
      rows, std::max(ceil_div(rows * weight.row_bytes(), Tuning::get().block_bytes), ceil_div(rows, kMaxBlockRows)));
  const int64_t threads = ThreadPool::get().num_threads();
  const Runs runs(num_panels, threads);
  const int64_t items = blocks * runs.count();
  const auto first_of_item = [&](int64_t item) {
    if (item >= items && next_weight.panels) {
      const Runs next_runs(next_weight.num_panels, threads);
      const int64_t run = std::min(next_runs.count() - 1, item - items);
      return next_weight.panels + next_runs.first_panel(run) * next_weight.panel_bytes;
    }
    const int64_t run = std::min(runs.count() - 1, item / blocks);
    return reinterpret_cast<const char*>(weight.panels) + runs.first_panel(run) * weight.panel_distance();
  };
  ThreadPool::get().run(items, [&](int64_t item) {
    // All blocks of rows multiply a run before the next run begins, so its panels are read from memory once.
    const int64_t block = item % blocks, index = item / blocks;
    const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
    const Run run{runs.first_panel(index), runs.first_panel(index + 1), first_of_item(item + threads)};
    const auto& store_of_item = store.for_item();
    if constexpr (Weight::kFewRows > 0) {
      if (count <= Weight::kFewRows) {
        for_each_piece<Weight::kFewRows>(
            count, [&](int64_t, auto few) { multiply_few_rows<few>(x, first, weight, run, store_of_item); });
        return;
      }
    }
    multiply_block(x, first, count, weight, run, store_of_item);
  });
}

/// Stores the sums of a row with a panel of a linear layer in out [rows, n].
template <typename Out>
struct StoreSums {
  Out* out;
  int64_t n;

  const StoreSums& for_item() const { return *this; }
  void operator()(int64_t row, int64_t panel, Vec left, Vec right) const {
    const int64_t column = panel * kPanel;
    store_pair(out + row * n + column, {left, right}, n - column);
  }
  void prefetch(int64_t row, int64_t panel) const { prefetch_to_write(out + row * n + panel * kPanel); }
};

/// Stores activation(gate) * up of a row in out [rows, n]. A panel has kLanes columns of gate, then kLanes of up.
template <typename Out, typename Activation>
struct StoreGated {
  Out* out;
  int64_t n;

  const StoreGated& for_item() const { return *this; }
  [[gnu::always_inline]] void operator()(int64_t row, int64_t panel, Vec gate, Vec up) const {
    const int64_t column = panel * kLanes;
    const Vec product = Activation::template of<Out>(gate) * up;
    store_pair(out + row * n + column, {product, Vec(0.f)}, std::min(kLanes, n - column));
  }
  void prefetch(int64_t row, int64_t panel) const { prefetch_to_write(out + row * n + panel * kLanes); }
};

/// StoreGated for sums to which `multiply` adds parts first, if there are any.
template <typename Out, typename Activation>
struct StoreGatedSums : StoreGated<Out, Activation> {
  const GateParts* parts;

  const StoreGatedSums& for_item() const { return *this; }
};

/// x [rows, k] -> out [rows, n]
template <typename X, typename Weight, typename Out>
void linear(const X& x, int64_t rows, const Weight& weight, const NextWeight& next, int64_t n, Out* out) {
  multiply(x, rows, weight, ceil_div(n, kPanel), next, StoreSums<Out>{out, n});
}

/// x [rows, k] -> activation(x @ gate.T) * (x @ up.T) [rows, n]. parts: added to both products, or nullptr.
template <typename Activation, typename X, typename Weight, typename Out>
void gated_linear(
    const X& x,
    int64_t rows,
    const Weight& weight,
    const NextWeight& next,
    int64_t n,
    Out* out,
    const GateParts* parts) {
  multiply(x, rows, weight, ceil_div(n, kLanes), next, StoreGatedSums<Out, Activation>{{out, n}, parts});
}

/// x [rows, k] as floats
template <typename X>
void widen_rows(const X* x, int64_t rows, int64_t k, float* out) {
  for_each_row_block(rows, k, [=](int64_t first, int64_t end) {
    for (int64_t i = first * k; i < end * k; i += kPanel) store_pair(out + i, load_pair(x + i, end * k - i), end * k - i);
  });
}

/// Copies rows of an embedding [n, k], converted to X, to out [count, k]. ids are below n.
template <typename T, typename X>
void copy_rows(const int64_t* ids, int64_t count, const T* weight, int64_t k, X* out) {
  for_each_row_block(count, k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const T* from = weight + ids[i] * k;
      // One number at a time: `store_pair` rounds to bfloat16 by instructions that not every build has.
      std::transform(from, from + k, out + i * k, [](T x) { return static_cast<X>(static_cast<float>(x)); });
    }
  });
}

/// Reads columns of a packed weight [n, k], which are the rows of an embedding, into out [count, k]. ids are below n.
template <typename T, typename X>
void unpack_rows(const int64_t* ids, int64_t count, const T* panels, int64_t k, X* out) {
  constexpr int64_t kPerWord = Dot<T, X>::kPerWord;
  for_each_row_block(count, k, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const T* from = panels + ids[i] / kPanel * kPanel * k + ids[i] % kPanel * kPerWord;
      X* to = out + i * k;
      for (int64_t word = 0; word < k; word += kPerWord) std::copy_n(from + word * kPanel, kPerWord, to + word);
    }
  });
}

}  // namespace tercet
