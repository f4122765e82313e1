// Gated DeltaNets (arXiv 2412.06464) as in Qwen 3.5: a convolution, and a state for each request and value head.
#pragma once

#include <cmath>
#include <vector>

#include "activation.h"
#include "norm.h"

namespace tercet {

/// The new tokens of a layer, and the states of its requests.
template <typename T>
struct DeltaNetTokens {
  /// [tokens, columns]: queries, keys, values, gates, strengths and decays, one after another. The first three are
  /// convolved.
  const T* projected;
  int64_t key_heads, value_heads, key_dim, value_dim, width;
  /// [width, channels], those of the oldest token first
  const float* convolution;
  /// [value_heads]
  const float *decay_rate, *decay_bias;
  /// [value_dim]
  const float* norm;
  double eps;
  /// The row of each request, and its first token. starts is null if each has one token.
  const int64_t* rows;
  const int64_t* starts;
  const int64_t* positions;
  /// Of each request: its length when its state is saved, after one of these tokens, or 0; and the row that it is saved in.
  /// saved_lens is null if nothing is saved.
  const int64_t *saved_lens, *saved_rows;
  /// [rows, width - 1, channels]: the last inputs of the convolution, that of position p at p % (width - 1)
  T* recent;
  /// [rows, value_heads, key_dim, value_dim]
  float* states;
  /// [tokens, value_heads * value_dim]
  T* out;

  int64_t key_size() const { return key_heads * key_dim; }
  int64_t value_size() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_size() + value_size(); }
  int64_t columns() const { return channels() + value_size() + 2 * value_heads; }
  int64_t group() const { return value_heads / key_heads; }
  int64_t first_token(int64_t request) const { return starts ? starts[request] : request; }
  int64_t saved_len(int64_t request) const { return saved_lens ? saved_lens[request] : 0; }
};

/// Computes the tokens of a request for one key head and its value heads, whose channels no other head touches. Tokens come
/// in blocks. For each, it convolves the inputs, then advances each state, a block of columns at a time, then normalises
/// the outputs. A token has the same operations in any block, so it has the same bits.
template <typename T>
class DeltaNetHead {
 public:
  DeltaNetHead(const DeltaNetTokens<T>& in, int64_t request, int64_t head)
      : in_(in), head_(head), first_(in.first_token(request)), end_(in.first_token(request + 1)), row_(in.rows[request]) {
    if (const int64_t length = in.saved_len(request)) {
      saved_end_ = first_ + length - in.positions[first_];
      saved_row_ = in.saved_rows[request];
    }
    const int64_t room = std::min(kTokens, end_ - first_), values = in.group() * value_stride();
    static thread_local std::vector<float> of_tokens, of_state;
    // Numbers after the ends of heads stay zeros, so they change no sum.
    of_tokens.assign(room * (2 * key_stride() + 2 * values + 2 * in.group() + 1), 0.f);
    if (const size_t size = in.key_dim * value_stride(); of_state.size() < size) of_state.resize(size);
    queries_ = of_tokens.data();
    keys_ = queries_ + room * key_stride();
    values_ = keys_ + room * key_stride();
    outputs_ = values_ + room * values;
    decays_ = outputs_ + room * values;
    strengths_ = decays_ + room * in.group();
    products_ = strengths_ + room * in.group();
    state_ = of_state.data();
  }

  void run() {
    for (int64_t first = first_, count; first < end_; first += count) {
      count = std::min(kTokens, (first < saved_end_ ? saved_end_ : end_) - first);
      const bool saves = first + count == saved_end_;
      for (int64_t token = 0; token < count; ++token) prepare(first + token, token);
      for (int64_t head = 0; head < in_.group(); ++head) {
        read_state(head, in_.positions[first] == 0);
        for (int64_t column = 0; column < in_.value_dim; column += kColumns) advance(head, column, count);
        write_state(head, row_);
        if (saves) write_state(head, saved_row_);
      }
      for (int64_t token = 0; token < count; ++token) finish(first + token, token);
      if (saves) save_inputs();
    }
    for (int64_t token = std::max(first_, end_ - in_.width + 1); token < end_; ++token)
      keep(input(token), recent(row_, in_.positions[token]));
  }

 private:
  static constexpr int64_t kTokens = 32;
  /// Of a state: the sums of two products with as many columns take eight registers.
  static constexpr int64_t kColumns = 2 * kPanel;

  int64_t key_stride() const { return round_up(in_.key_dim, kPanel); }
  int64_t value_stride() const { return round_up(in_.value_dim, kColumns); }
  int64_t value_head(int64_t head) const { return head_ * in_.group() + head; }
  float* values(int64_t token, int64_t head) const { return values_ + (token * in_.group() + head) * value_stride(); }
  float* outputs(int64_t token, int64_t head) const { return outputs_ + (token * in_.group() + head) * value_stride(); }
  const T* input(int64_t token) const { return in_.projected + token * in_.columns(); }
  T* recent(int64_t row, int64_t position) const {
    return in_.recent + (row * (in_.width - 1) + position % (in_.width - 1)) * in_.channels();
  }

  /// Makes query, key, values, decays and strengths of a token.
  void prepare(int64_t token, int64_t place) {
    const int64_t key_dim = in_.key_dim, value_dim = in_.value_dim;
    float *q = queries_ + place * key_stride(), *k = keys_ + place * key_stride();
    convolve(token, head_ * key_dim, key_dim, q);
    convolve(token, in_.key_size() + head_ * key_dim, key_dim, k);
    const float to_unit_q = to_unit(q), to_unit_k = to_unit(k);
    const Vec of_q(to_unit_q / std::sqrt(static_cast<float>(key_dim))), of_k(to_unit_k);
    FloatPair product{Vec(0.f), Vec(0.f)};
    for (int64_t i = 0; i < key_dim; i += kPanel) {
      const FloatPair of_query = load_pair(q + i) * of_q, of_key = load_pair(k + i) * of_k;
      store_pair(q + i, of_query);
      store_pair(k + i, of_key);
      product = product + of_query * of_key;
    }
    products_[place] = sum_of(product.left + product.right);
    const T* scalars = in_.projected + token * in_.columns() + in_.channels() + in_.value_size();
    for (int64_t head = 0; head < in_.group(); ++head) {
      const int64_t number = value_head(head);
      convolve(token, 2 * in_.key_size() + number * value_dim, value_dim, values(place, head));
      const float strength = scalars[number];
      const float decay = static_cast<float>(scalars[in_.value_heads + number]) + in_.decay_bias[number];
      const float softplus = decay > 20.f ? decay : std::log1p(std::exp(decay));
      strengths_[place * in_.group() + head] = 1.f / (1.f + std::exp(-strength));
      decays_[place * in_.group() + head] = std::exp(-in_.decay_rate[number] * softplus);
    }
  }

  /// 1 / |x|, of a query or a key.
  float to_unit(const float* x) const {
    FloatPair squares{Vec(0.f), Vec(0.f)};
    for (int64_t i = 0; i < in_.key_dim; i += kPanel) squares = squares + load_pair(x + i) * load_pair(x + i);
    return 1.f / std::sqrt(sum_of(squares.left + squares.right) + 1e-6f);
  }

  /// The SiLU of the convolution of n channels. Inputs of earlier steps come from `recent`. Those before position 0 count as
  /// zeros.
  void convolve(int64_t token, int64_t channel, int64_t n, float* to) const {
    const int64_t position = in_.positions[token], width = in_.width;
    for (int64_t i = 0; i < n; i += kPanel) {
      FloatPair sum{Vec(0.f), Vec(0.f)};
      for (int64_t back = std::min(width - 1, position); back >= 0; --back) {
        const T* from = token - back >= first_ ? input(token - back) : recent(row_, position - back);
        const float* weight = in_.convolution + (width - 1 - back) * in_.channels();
        const FloatPair x = load_pair(from + channel + i, n - i), w = load_pair(weight + channel + i, n - i);
        sum = {at::vec::fmadd(x.left, w.left, sum.left), at::vec::fmadd(x.right, w.right, sum.right)};
      }
      store_pair(to + i, silu(sum), n - i);
    }
  }

  /// Copies the state of a value head, a block of columns after another, with zeros after the last one. A new request has
  /// zeros.
  void read_state(int64_t head, bool is_new) {
    const float* from = stored_state(head, row_);
    for (int64_t i = 0; i < in_.key_dim; ++i, from += in_.value_dim)
      for (int64_t column = 0; column < in_.value_dim; column += kColumns) {
        const int64_t n = is_new ? 0 : std::min(kColumns, in_.value_dim - column);
        float* to = block_of_state(column) + i * kColumns;
        std::copy_n(from + column, n, to);
        std::fill_n(to + n, kColumns - n, 0.f);
      }
  }

  void write_state(int64_t head, int64_t row) const {
    float* to = stored_state(head, row);
    for (int64_t i = 0; i < in_.key_dim; ++i, to += in_.value_dim)
      for (int64_t column = 0; column < in_.value_dim; column += kColumns)
        std::copy_n(block_of_state(column) + i * kColumns, std::min(kColumns, in_.value_dim - column), to + column);
  }

  float* stored_state(int64_t head, int64_t row) const {
    return in_.states + (row * in_.value_heads + value_head(head)) * in_.key_dim * in_.value_dim;
  }

  float* block_of_state(int64_t column) const { return state_ + column * in_.key_dim; }

  /// Advances columns of the state of a value head by `count` tokens. With S the state before a token, g its decay, and
  /// d = strength * (v - g S^T k): the output is g S^T q + (k q) d, and S becomes g S + k d^T.
  void advance(int64_t head, int64_t column, int64_t count) {
    const int64_t key_dim = in_.key_dim;
    float* const state = block_of_state(column);
    for (int64_t token = 0; token < count; ++token) {
      const float *q = queries_ + token * key_stride(), *k = keys_ + token * key_stride();
      const int64_t at = token * in_.group() + head;
      const Vec decay(decays_[at]), strength(strengths_[at]), product(products_[token]);
      Floats of_k[4] = {}, of_q[4] = {};
      for (int64_t i = 0; i < key_dim; ++i) {
        const Floats key = broadcast_float(k[i]), query = broadcast_float(q[i]);
        unrolled<4>([&](auto v) {
          const Floats s = load_floats(state + i * kColumns + v * kLanes);
          of_k[v] = fused_multiply_add(s, key, of_k[v]);
          of_q[v] = fused_multiply_add(s, query, of_q[v]);
        });
      }
      Floats change[4];
      unrolled<4>([&](auto v) {
        const int64_t place = column + v * kLanes;
        const Vec was = to_vec(of_k[v]) * decay, read = to_vec(of_q[v]) * decay;
        const Vec d = strength * (Vec::loadu(values(token, head) + place) - was);
        at::vec::fmadd(product, d, read).store(outputs(token, head) + place);
        change[v] = to_floats(d);
      });
      const Floats factor = to_floats(decay);
      for (int64_t i = 0; i < key_dim; ++i) {
        const Floats key = broadcast_float(k[i]);
        unrolled<4>([&](auto v) {
          float* s = state + i * kColumns + v * kLanes;
          store_floats(s, fused_multiply_add(key, change[v], load_floats(s) * factor));
        });
      }
    }
  }

  static Floats fused_multiply_add(Floats a, Floats b, Floats c) {
    return to_floats(at::vec::fmadd(to_vec(a), to_vec(b), to_vec(c)));
  }

  /// Normalises the outputs of a token, multiplies them with the SiLU of their gates, and stores them.
  void finish(int64_t token, int64_t place) const {
    const int64_t n = in_.value_dim;
    for (int64_t head = 0; head < in_.group(); ++head) {
      const int64_t at = value_head(head) * n;
      const float* x = outputs(place, head);
      const T* gates = in_.projected + token * in_.columns() + in_.channels() + at;
      T* to = in_.out + token * in_.value_size() + at;
      const Vec scale(inverse_rms_of(x, n, in_.eps));
      for (int64_t i = 0; i < n; i += kPanel) {
        const FloatPair gate = load_pair(gates + i, n - i);
        const FloatPair normed = load_pair(x + i) * scale * load_pair(in_.norm + i, n - i);
        store_pair(to + i, normed * silu(gate), n - i);
      }
    }
  }

  static FloatPair silu(FloatPair x) { return {Silu::of<float>(x.left), Silu::of<float>(x.right)}; }

  /// Saves the inputs that a step after the saved state convolves. Earlier steps have kept those before the first token.
  void save_inputs() const {
    const int64_t position = in_.positions[first_];
    for (int64_t token = saved_end_ - std::min(in_.width - 1, position + saved_end_ - first_); token < saved_end_; ++token) {
      const int64_t at = position + token - first_;
      keep(token >= first_ ? input(token) : recent(row_, at), recent(saved_row_, at));
    }
  }

  /// Copies this head's channels of a token.
  void keep(const T* from, T* to) const {
    const auto copy = [&](int64_t channel, int64_t n) { std::copy_n(from + channel, n, to + channel); };
    copy(head_ * in_.key_dim, in_.key_dim);
    copy(in_.key_size() + head_ * in_.key_dim, in_.key_dim);
    copy(2 * in_.key_size() + value_head(0) * in_.value_dim, in_.group() * in_.value_dim);
  }

  const DeltaNetTokens<T>& in_;
  const int64_t head_, first_, end_, row_;
  /// The end of the tokens after which the state is saved, and its row.
  int64_t saved_end_ = 0, saved_row_ = 0;
  /// [kTokens, key_stride]
  float *queries_, *keys_;
  /// [kTokens, group, value_stride]
  float *values_, *outputs_;
  /// [kTokens, group]
  float *decays_, *strengths_;
  /// [kTokens], of query and key
  float* products_;
  /// [blocks, key_dim, kColumns]
  float* state_;
};

/// Computes the new tokens of requests.
template <typename T>
void run_delta_net(const DeltaNetTokens<T>& in, int64_t requests) {
  ThreadPool::get().run(requests * in.key_heads, [&](int64_t item) {
    DeltaNetHead<T>(in, item / in.key_heads, item % in.key_heads).run();
  });
}

}  // namespace tercet
