// Kernels of the local engine on a CPU, behind a plain C interface: no header of torch or Python is needed.
//
// Shapes: S rows of the cache, M positions; N tokens of a step, H query heads, K key-value heads, G = H / K, D head
// dimension. Every function takes the number of threads. A thread computes whole rows or whole (block, head) pairs, and
// every sum has a fixed order, so the number of threads does not change a bit.
//
// `T` is float or bf16. Everything is computed in float; with bf16 a result is rounded where transformers rounds it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

namespace {

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };

#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, i16{__VA_ARGS__})
#endif

template <class To, class From> inline To as(From x) { To y; static_assert(sizeof x == sizeof y, ""); memcpy(&y, &x, sizeof y); return y; }
inline v16 load(const float* p) { v16 x; memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, v16 x) { memcpy(p, &x, sizeof x); }
inline v16 load(const bf16* p) { h16 x; memcpy(&x, p, sizeof x); return as<v16>(__builtin_convertvector(x, u16) << 16); }
inline u16 bf16_bits(v16 x) {  // to nearest, ties to even; NaN stays NaN
  u16 u = as<u16>(x);
  u16 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return as<u16>(x == x ? as<i16>(r) : as<i16>(u16{} + 0x7fc0));
}
inline void store(bf16* p, v16 x) { h16 y = __builtin_convertvector(bf16_bits(x), h16); memcpy(p, &y, sizeof y); }
template <class T> inline v16 rounded(v16 x);
template <> inline v16 rounded<float>(v16 x) { return x; }
template <> inline v16 rounded<bf16>(v16 x) { return as<v16>(bf16_bits(x) << 16); }
template <class T> inline v16 load_some(const T* p, int64_t n, float fill = 0) {  // the first n of 16
  if (n >= 16) return load(p);
  T part[16] = {};
  memcpy(part, p, n * sizeof(T));
  v16 x = load(part);
  if (fill != 0) for (int64_t i = n; i < 16; i++) x[i] = fill;
  return x;
}
template <class T> inline void store_some(T* p, v16 x, int64_t n) {
  if (n >= 16) return store(p, x);
  T part[16];
  store(part, x);
  memcpy(p, part, n * sizeof(T));
}
inline v16 larger(v16 a, v16 b) { return a > b ? a : b; }
inline float sum(v16 x) {
  for (int step = 8; step; step /= 2) for (int i = 0; i < step; i++) x[i] += x[i + step];
  return x[0];
}
inline float largest(v16 x) {
  float m = x[0];
  for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m;
  return m;
}
// Lane i of the result is the sum over the lanes of a[i].
inline v16 sums(const v16* a) {
  v16 b[8], c[4], d[2];
  for (int i = 0; i < 8; i++)
    b[i] = MIX(a[2 * i], a[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           MIX(a[2 * i], a[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  for (int i = 0; i < 4; i++)
    c[i] = MIX(b[2 * i], b[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           MIX(b[2 * i], b[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  for (int i = 0; i < 2; i++)
    d[i] = MIX(c[2 * i], c[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           MIX(c[2 * i], c[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  return MIX(d[0], d[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         MIX(d[0], d[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
// exp(x) for x <= 88, within 2 units in the last place; 0 below -87.3. NaN stays NaN.
inline v16 exponential(v16 x) {
  v16 shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;  // the nearest integer
  v16 f = x - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  v16 y = f * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * (f * f) + f + 1.0f;
  i16 power = (as<i16>(shifted) - 0x4b400000 + 127) << 23;
  v16 result = y * as<v16>(power);
  return x < -87.3f ? v16{} : result;
}
inline v16 silu(v16 x) {
  v16 below = x < -87.0f ? v16{} - 87.0f : x;
  return x / (1.0f + exponential(below < 87.0f ? v16{} - below : v16{} - 87.0f));
}

const int64_t SMALL = 1 << 14;  // numbers that one thread is done with before others have started

// Attention

// A block: tokens order[begin:end], and the first `shared` positions of cache row `row`, which all of them may read.
struct Block { int64_t begin, end, shared, row; };

struct Scratch {
  std::vector<float> memory;
  float* of(size_t count) {
    if (memory.size() < count + 16) memory.resize(count + 16);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
  }
};

template <class T, int D> struct Attention {
  static constexpr int V = D / 16;
  const float* q; const T *keys, *values; T* out;
  int64_t K, G, M; const int64_t *rows, *positions, *order; float scale;

  // 16 queries at once, one in each lane, over the first `count` positions: a key is read once for all of them.
  void lanes(const float (*Q)[16], const T* k, const T* v, int64_t count, int64_t all_see, i16 limits, float* S,
             v16& most, v16& total, v16* O) const {
    most = v16{} - 1e30f;
    float wide[8][D];
    int64_t p = 0;
    for (; p + 8 <= count; p += 8) {
      for (int j = 0; j < 8; j++) for (int i = 0; i < V; i++) store(wide[j] + 16 * i, load(k + (p + j) * D + 16 * i));
      v16 a[8] = {};
      for (int d = 0; d < D; d++) { v16 x = load(Q[d]); for (int j = 0; j < 8; j++) a[j] += wide[j][d] * x; }
      for (int j = 0; j < 8; j++) store(S + (p + j) * 16, a[j]);
    }
    for (; p < count; p++) {
      for (int i = 0; i < V; i++) store(wide[0] + 16 * i, load(k + p * D + 16 * i));
      v16 a = {};
      for (int d = 0; d < D; d++) a += wide[0][d] * load(Q[d]);
      store(S + p * 16, a);
    }
    for (p = all_see; p < count; p++) {
      v16 hidden = v16{} - 1e30f, a = load(S + p * 16);
      store(S + p * 16, i16{} + (int32_t)p < limits ? a : hidden);
    }
    for (p = 0; p < count; p++) most = larger(most, load(S + p * 16));
    total = v16{};
    for (p = 0; p < count; p++) {
      v16 x = exponential(load(S + p * 16) - most);
      store(S + p * 16, x);
      total += x;
    }
    for (int d0 = 0; d0 < D; d0 += 16) {
      v16 acc[16] = {};
      float one[16];
      for (p = 0; p < count; p++) {
        store(one, load(v + p * D + d0));
        v16 x = load(S + p * 16);
        for (int d = 0; d < 16; d++) acc[d] += one[d] * x;
      }
      for (int d = 0; d < 16; d++) O[d0 + d] = acc[d];
    }
  }

  // The G queries of one token and head over positions shared:count of its own row, joined with what its lanes found.
  void rest(int64_t t, int64_t h, int64_t shared, int64_t count, int64_t lane, const v16& most, const v16& total,
            const v16* O, float* S) const {
    int64_t n = count - shared, padded = (n + 15) & ~(int64_t)15;
    const T* k = keys + ((rows[t] * K + h) * M + shared) * D;
    const T* v = values + ((rows[t] * K + h) * M + shared) * D;
    const float* query = q + (t * K + h) * G * D;
    float top[16], below[16];
    v16 sum_of[16], acc[16][V];
    for (int64_t g = 0; g < G; g++) { top[g] = shared ? most[lane + g] : -1e30f; sum_of[g] = v16{}; }
    for (int64_t p = 0; p < n; p += 16) {
      int64_t here = std::min<int64_t>(16, n - p);
      for (int64_t g = 0; g < G; g++) {
        v16 x[V], a[16] = {};
        for (int i = 0; i < V; i++) x[i] = load(query + g * D + 16 * i);
        for (int64_t j = 0; j < here; j++) for (int i = 0; i < V; i++) a[j] += x[i] * load(k + (p + j) * D + 16 * i);
        v16 s = sums(a) * scale;
        for (int64_t j = here; j < 16; j++) s[j] = -1e30f;
        store(S + g * padded + p, s);
      }
    }
    for (int64_t g = 0; g < G; g++) {
      v16 m = v16{} - 1e30f;
      for (int64_t p = 0; p < n; p += 16) m = larger(m, load(S + g * padded + p));
      float own = largest(m), before = top[g];
      top[g] = own > before ? own : before;
      below[g] = shared ? exponential(v16{} + (before - top[g]))[0] : 0.0f;
      for (int64_t p = 0; p < n; p += 16) {
        v16 x = exponential(load(S + g * padded + p) - top[g]);
        store(S + g * padded + p, x);
        sum_of[g] += x;
      }
      for (int i = 0; i < V; i++) acc[g][i] = v16{};
    }
    for (int64_t p0 = 0; p0 < n; p0 += 64) {
      int64_t end = std::min(n, p0 + 64);
      for (int64_t g = 0; g < G; g++) {
        v16 a[V];
        const float* s = S + g * padded;
        for (int i = 0; i < V; i++) a[i] = acc[g][i];
        for (int64_t p = p0; p < end; p++) for (int i = 0; i < V; i++) a[i] += s[p] * load(v + p * D + 16 * i);
        for (int i = 0; i < V; i++) acc[g][i] = a[i];
      }
    }
    for (int64_t g = 0; g < G; g++) {
      float all = sum(sum_of[g]) + (shared ? total[lane + g] * below[g] : 0.0f), inverse = 1.0f / all;
      T* o = out + ((t * K + h) * G + g) * D;
      for (int i = 0; i < V; i++) {
        v16 y = acc[g][i] * inverse;
        if (shared) {
          v16 of_lanes;
          for (int j = 0; j < 16; j++) of_lanes[j] = O[16 * i + j][lane + g];
          y += of_lanes * (below[g] * inverse);
        }
        store(o + 16 * i, y);
      }
    }
  }

  void block(const Block& b, int64_t h, Scratch& scratch) const {
    int64_t longest = 0, all_see = b.shared;
    i16 limits = i16{} + (int32_t)b.shared;
    for (int64_t m = b.begin; m < b.end; m++) {
      int64_t seen = positions[order[m]] + 1;
      longest = std::max(longest, seen - b.shared);
      all_see = std::min(all_see, seen);
      for (int64_t g = 0; g < G && seen < b.shared; g++) limits[(m - b.begin) * G + g] = (int32_t)seen;
    }
    float* S = scratch.of(std::max(b.shared * 16, G * (longest + 16)));
    v16 most = {}, total = {}, O[D];
    if (b.shared) {
      alignas(64) float Q[D][16] = {};
      for (int64_t m = b.begin, lane = 0; m < b.end; m++)
        for (int64_t g = 0; g < G; g++, lane++)
          for (int d = 0; d < D; d++) Q[d][lane] = q[((order[m] * K + h) * G + g) * D + d] * scale;
      lanes(Q, keys + (b.row * K + h) * M * D, values + (b.row * K + h) * M * D, b.shared, all_see, limits, S, most,
            total, O);
    }
    for (int64_t m = b.begin; m < b.end; m++)
      rest(order[m], h, b.shared, std::max(b.shared, positions[order[m]] + 1), (m - b.begin) * G, most, total, O, S);
  }
};

template <class T, int D> void attend(const Attention<T, D>& a, const int64_t* blocks, int64_t num_blocks, int threads) {
  const Block* all = (const Block*)blocks;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && num_blocks * a.K > 1)
  for (int64_t i = 0; i < num_blocks * a.K; i++) {
    static thread_local Scratch scratch;
    a.block(all[i / a.K], i % a.K, scratch);
  }
}

template <class T> int attend_any(const float* q, const T* keys, const T* values, T* out, int64_t K, int64_t G, int64_t D,
                                  int64_t M, const int64_t* rows, const int64_t* positions, const int64_t* order,
                                  const int64_t* blocks, int64_t num_blocks, float scale, int threads) {
#define CASE(N) \
  case N: attend(Attention<T, N>{q, keys, values, out, K, G, M, rows, positions, order, scale}, blocks, num_blocks, threads); return 0;
  switch (D) { CASE(16) CASE(32) CASE(64) CASE(128) }
#undef CASE
  return 1;
}

// Norms and products of elements

template <class T> inline float inverse_norm(const T* x, int64_t C, float eps) {
  v16 squares = {};
  for (int64_t c = 0; c < C; c += 16) { v16 a = load_some(x + c, C - c); squares += a * a; }
  return 1.0f / std::sqrt(sum(squares) / (float)C + eps);
}

template <class T> void norm(const T* x, const T* w, T* y, int64_t n, int64_t C, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * C > SMALL)
  for (int64_t i = 0; i < n; i++) {
    float r = inverse_norm(x + i * C, C, eps);
    for (int64_t c = 0; c < C; c += 16)
      store_some(y + i * C + c, load_some(w + c, C - c) * rounded<T>(load_some(x + i * C + c, C - c) * r), C - c);
  }
}

template <class T> void silu_multiply(const T* both, T* y, int64_t n, int64_t I, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * I > SMALL)
  for (int64_t i = 0; i < n; i++)
    for (int64_t c = 0; c < I; c += 16) {
      v16 gate = rounded<T>(silu(load_some(both + i * 2 * I + c, I - c)));
      store_some(y + i * I + c, gate * load_some(both + i * 2 * I + I + c, I - c), I - c);
    }
}

// Queries [N, H, D] in float with their norm and rotary embedding; keys and values into the cache [S, K, M, D].
template <class T> void rotate_and_write(const T* qkv, const T* q_weight, const T* k_weight, const float* cosine,
                                         const float* sine, float* q, T* keys, T* values, int64_t N, int64_t H, int64_t K,
                                         int64_t D, int64_t M, const int64_t* rows, const int64_t* positions, float eps,
                                         int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && N * (H + 2 * K) * D > SMALL)
  for (int64_t i = 0; i < N; i++) {
    const T* token = qkv + i * (H + 2 * K) * D;
    const float *c = cosine + positions[i] * D, *s = sine + positions[i] * D;
    int64_t at = (rows[i] * K * M + positions[i]) * D;
    float x[128];  // the largest D
    for (int64_t h = 0; h < H + K; h++) {
      const T *head = token + h * D, *w = h < H ? q_weight : k_weight;
      float r = w ? inverse_norm(head, D, eps) : 1.0f;
      for (int64_t d = 0; d < D; d += 16) {
        v16 a = load(head + d);
        store(x + d, w ? rounded<T>(load(w + d) * rounded<T>(a * r)) : a);
      }
      for (int64_t d = 0; d < D; d += 16) {
        v16 turned;  // the halves swap, the first with a minus
        for (int j = 0; j < 16; j++) turned[j] = d + j < D / 2 ? -x[d + j + D / 2] : x[d + j - D / 2];
        v16 y = rounded<T>(rounded<T>(load(x + d) * load(c + d)) + rounded<T>(turned * load(s + d)));
        if (h < H) store(q + (i * H + h) * D + d, y);
        else store(keys + at + (h - H) * M * D + d, y);
      }
    }
    for (int64_t h = 0; h < K; h++) memcpy(values + at + h * M * D, token + (H + K + h) * D, D * sizeof(T));
  }
}

// A step of the engine in float

// BLAS's product of matrices that lie by columns.
typedef void Gemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                  const float* alpha, const float* a, const int* lda, const float* b, const int* ldb, const float* beta,
                  float* c, const int* ldc);

// Weights lie by rows, [out, in]; a bias or a norm that is not there is null.
struct DecoderLayer {
  const float *input_norm, *qkv[3], *biases[3], *q_norm, *k_norm, *output, *mlp_norm, *gate_up[2], *down;
};
// C hidden size, I size inside the MLP, V vocabulary, `layers` of them.
struct Decoder {
  Gemm* gemm;
  int64_t C, H, K, D, I, V, layers;
  const float *cosine, *sine, *final_norm, *head;
  DecoderLayer layer[1];

  // y [n, width] = x [n, in] times weight [width, in] transposed, plus `beta` times y; rows of y are `stride` apart. As
  // torch calls it, so the bits are those of torch.mm and torch.addmm.
  void product(const float* x, int64_t n, int64_t in, const float* weight, int64_t width, float beta, float* y,
               int64_t stride) const {
    int rows = n, inside = in, columns = width, apart = stride;
    float one = 1;
    gemm("T", "N", &columns, &rows, &inside, &one, weight, &inside, x, &inside, &beta, y, &apart);
  }

  // The products of x [n, C], beside each other.
  void beside(const float* x, int64_t n, const float* const* weights, const float* const* biases, const int64_t* widths,
              int count, float* y) const {
    int64_t stride = std::accumulate(widths, widths + count, (int64_t)0);
    for (int j = 0; j < count; y += widths[j++]) {
      const float* bias = biases ? biases[j] : nullptr;
      for (int64_t i = 0; bias && i < n; i++) memcpy(y + i * stride, bias, widths[j] * sizeof(float));
      product(x, n, C, weights[j], widths[j], bias ? 1 : 0, y, stride);
    }
  }
};

// Rows of x [N, width], in the order of `wanted`.
inline void pick(const float* x, int64_t width, const int64_t* wanted, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i++) memcpy(y + i * width, x + wanted[i] * width, width * sizeof(float));
}

// Training: the parts of a decoder layer over packed rows, and their derivatives, in float

// Sums over rows have a fixed order: of 64 rows first, then of these sums.
const int64_t CHUNK_ROWS = 64;

template <class Rows> void sum_rows(int64_t n, int64_t width, float* total, int threads, Rows rows) {
  int64_t chunks = (n + CHUNK_ROWS - 1) / CHUNK_ROWS;
  std::vector<float> parts(chunks * width, 0.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1 && chunks > 1)
  for (int64_t c = 0; c < chunks; c++)
    for (int64_t i = c * CHUNK_ROWS; i < std::min(n, (c + 1) * CHUNK_ROWS); i++) rows(i, parts.data() + c * width);
  std::fill(total, total + width, 0.0f);
  for (int64_t c = 0; c < chunks; c++) for (int64_t j = 0; j < width; j++) total[j] += parts[c * width + j];
}

// The derivative of a norm by its input, and by its weight (added to `dw`). `add`: what is in `dx` is added to it.
template <bool add> inline void norm_back(const float* x, const float* w, const float* g, float* dx, float* dw, int64_t C,
                                          float eps) {
  float r = inverse_norm(x, C, eps);
  v16 dot = {};
  for (int64_t c = 0; c < C; c += 16) {
    v16 a = load_some(x + c, C - c), b = load_some(g + c, C - c);
    dot += a * b * load_some(w + c, C - c);
    store_some(dw + c, load_some(dw + c, C - c) + a * b * r, C - c);
  }
  float s = sum(dot) * r * r * r / (float)C;
  for (int64_t c = 0; c < C; c += 16) {
    v16 y = load_some(g + c, C - c) * load_some(w + c, C - c) * r - load_some(x + c, C - c) * s;
    store_some(dx + c, add ? y + load_some(dx + c, C - c) : y, C - c);
  }
}

void silu_multiply_back(const float* both, const float* g, float* dboth, int64_t n, int64_t I, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * I > SMALL)
  for (int64_t i = 0; i < n; i++)
    for (int64_t c = 0; c < I; c += 16) {
      v16 x = load_some(both + i * 2 * I + c, I - c), up = load_some(both + i * 2 * I + I + c, I - c);
      v16 of = load_some(g + i * I + c, I - c), below = larger(x, v16{} - 87.0f);
      v16 s = 1.0f / (1.0f + exponential(below < 87.0f ? v16{} - below : v16{} - 87.0f));
      store_some(dboth + i * 2 * I + c, of * up * s * (1.0f + x * (1.0f - s)), I - c);
      store_some(dboth + i * 2 * I + I + c, of * x * s, I - c);
    }
}

// Queries [T, H, D] and keys [T, K, D] of qkv [T, (H + 2 K) * D], with their norm and rotary embedding.
void rotate(const float* qkv, const float* q_weight, const float* k_weight, const float* cosine, const float* sine,
            float* q, float* k, int64_t T, int64_t H, int64_t K, int64_t D, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * (H + K) * D > SMALL)
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H + K; h++) {
      const float *x = qkv + (t * (H + 2 * K) + h) * D, *w = h < H ? q_weight : k_weight;
      float *y = h < H ? q + (t * H + h) * D : k + (t * K + h - H) * D, r = w ? inverse_norm(x, D, eps) : 1.0f;
      float a[128];  // the largest D
      for (int64_t d = 0; d < D; d++) a[d] = w ? w[d] * (x[d] * r) : x[d];
      const float *c = cosine + t * D, *s = sine + t * D;
      for (int64_t d = 0; d < D / 2; d++) {
        y[d] = a[d] * c[d] - a[d + D / 2] * s[d];
        y[d + D / 2] = a[d + D / 2] * c[d + D / 2] + a[d] * s[d + D / 2];
      }
    }
}

// Its derivative: dqkv of all but the values, and `dw` [2, D] of the two norms.
void rotate_back(const float* qkv, const float* q_weight, const float* k_weight, const float* cosine, const float* sine,
                 const float* dq, const float* dk, float* dqkv, float* dw, int64_t T, int64_t H, int64_t K, int64_t D,
                 float eps, int threads) {
  sum_rows(T, 2 * D, dw, threads, [=](int64_t t, float* part) {
    const float *c = cosine + t * D, *s = sine + t * D;
    for (int64_t h = 0; h < H + K; h++) {
      int64_t at = (t * (H + 2 * K) + h) * D;
      const float *g = h < H ? dq + (t * H + h) * D : dk + (t * K + h - H) * D, *w = h < H ? q_weight : k_weight;
      float a[128];
      for (int64_t d = 0; d < D / 2; d++) {
        a[d] = g[d] * c[d] + g[d + D / 2] * s[d + D / 2];
        a[d + D / 2] = g[d + D / 2] * c[d + D / 2] - g[d] * s[d];
      }
      if (w) norm_back<false>(qkv + at, w, a, dqkv + at, part + (h < H ? 0 : D), D, eps);
      else memcpy(dqkv + at, a, D * sizeof(float));
    }
  });
}

// Attention over a tree of segments: each token sees the segments on the way to the root, and its own up to itself.
// 16 queries at once, one in each lane: the G heads of 16 / G tokens that read the same keys.
struct Run { int64_t begin, end; };  // of packed tokens

struct TreeBlock {
  std::vector<Run> seen;  // the last run is the block's own segment, up to its last token
  int64_t first, end, count;  // tokens; count of the positions that are seen
};

std::vector<TreeBlock> tree_blocks(const int64_t* begins, const int64_t* parents, int64_t segments, int64_t T, int64_t G) {
  std::vector<TreeBlock> blocks;
  int64_t most = std::max<int64_t>(1, 16 / G);
  for (int64_t s = 0; s < segments; s++) {
    int64_t end = s + 1 < segments ? begins[s + 1] : T, before = 0;
    std::vector<Run> way;
    for (int64_t p = parents[s]; p >= 0; p = parents[p]) {
      way.push_back({begins[p], p + 1 < segments ? begins[p + 1] : T});
      before += way.back().end - way.back().begin;
    }
    for (int64_t t = begins[s]; t < end; t += most) {
      int64_t last = std::min(end, t + most);
      blocks.push_back({way, t, last, before + last - begins[s]});
      blocks.back().seen.push_back({begins[s], last});
    }
  }
  return blocks;
}

template <int D> struct TreeAttention {
  static constexpr int V = D / 16;
  const float *q, *k, *v; float *out, *log_sums; int64_t H, K, v_stride; float scale;
  const float* d_out; float *dq, *dk, *dv; int64_t dv_stride;

  int64_t G() const { return H / K; }
  int64_t lanes_of(const TreeBlock& b) const { return (b.end - b.first) * G(); }
  int64_t row(const TreeBlock& b, int64_t h, int64_t lane) const { return (b.first + lane / G()) * H + h * G() + lane % G(); }

  void transposed(const TreeBlock& b, int64_t h, const float* x, float factor, float (*into)[16]) const {
    for (int64_t lane = 0; lane < 16; lane++) {
      bool used = lane < lanes_of(b);
      const float* from = x + (used ? row(b, h, lane) : 0) * D;
      for (int d = 0; d < D; d++) into[d][lane] = used ? from[d] * factor : 0.0f;
    }
  }

  // into[p] = the products of the queries with the vector of each position that is seen.
  void products(const TreeBlock& b, const float (*Q)[16], const float* x, int64_t stride, float* into) const {
    for (const Run& run : b.seen) {
      int64_t p = run.begin;
      for (; p + 8 <= run.end; p += 8, into += 8 * 16) {
        const float* from = x + p * stride;
        v16 a[8] = {};
        for (int d = 0; d < D; d++) {
          v16 query = load(Q[d]);
          for (int j = 0; j < 8; j++) a[j] += query * from[j * stride + d];
        }
        for (int j = 0; j < 8; j++) store(into + 16 * j, a[j]);
      }
      for (; p < run.end; p++, into += 16) {
        v16 a = {}, c = {};
        for (int d = 0; d < D; d += 2) { a += load(Q[d]) * x[p * stride + d]; c += load(Q[d + 1]) * x[p * stride + d + 1]; }
        store(into, a + c);
      }
    }
  }

  // into[d] = the sum over the positions that are seen of their weight times their vector's element d.
  void weighted(const TreeBlock& b, const float* weights, const float* x, int64_t stride, v16* into) const {
    for (int d0 = 0; d0 < D; d0 += 16) {
      v16 a[16] = {};
      const float* w = weights;
      for (const Run& run : b.seen)
        for (int64_t p = run.begin; p < run.end; p++, w += 16) {
          v16 weight = load(w);
          const float* from = x + p * stride + d0;
          for (int d = 0; d < 16; d++) a[d] += weight * from[d];
        }
      for (int d = 0; d < 16; d++) into[d0 + d] = a[d];
    }
  }

  // To each position that is seen, add its weights times the rows [16, D].
  void spread(const TreeBlock& b, const float* weights, const float (*rows)[D], float* to, int64_t stride) const {
    int64_t used = lanes_of(b);
    for (const Run& run : b.seen) {
      int64_t p = run.begin;
      for (; p + 4 <= run.end; p += 4, weights += 64) {
        v16 a[4][V];
        for (int j = 0; j < 4; j++) for (int i = 0; i < V; i++) a[j][i] = load(to + (p + j) * stride + 16 * i);
        for (int64_t lane = 0; lane < used; lane++)
          for (int i = 0; i < V; i++) {
            v16 x = load(rows[lane] + 16 * i);
            for (int j = 0; j < 4; j++) a[j][i] += weights[16 * j + lane] * x;
          }
        for (int j = 0; j < 4; j++) for (int i = 0; i < V; i++) store(to + (p + j) * stride + 16 * i, a[j][i]);
      }
      for (; p < run.end; p++, weights += 16)
        for (int i = 0; i < V; i++) {
          v16 a = load(to + p * stride + 16 * i);
          for (int64_t lane = 0; lane < used; lane++) a += weights[lane] * load(rows[lane] + 16 * i);
          store(to + p * stride + 16 * i, a);
        }
    }
  }

  // A token sees nothing behind itself.
  void mask(const TreeBlock& b, float* scores, float hidden) const {
    for (int64_t t = b.first + 1; t < b.end; t++)
      for (int64_t lane = 0; lane < (t - b.first) * G(); lane++) scores[(b.count - (b.end - t)) * 16 + lane] = hidden;
  }

  void forward(const TreeBlock& b, int64_t h, Scratch& scratch) const {
    alignas(64) float Q[D][16];
    float* S = scratch.of(b.count * 16);
    transposed(b, h, q, scale, Q);
    products(b, Q, k + h * D, K * D, S);
    mask(b, S, -1e30f);
    v16 most = v16{} - 1e30f, total = {}, O[D];
    for (int64_t p = 0; p < b.count; p++) most = larger(most, load(S + p * 16));
    for (int64_t p = 0; p < b.count; p++) {
      v16 x = exponential(load(S + p * 16) - most);
      store(S + p * 16, x);
      total += x;
    }
    weighted(b, S, v + h * D, v_stride, O);
    for (int d = 0; d < D; d++) O[d] /= total;
    for (int64_t lane = 0; lane < lanes_of(b); lane++) {
      int64_t at = row(b, h, lane);
      for (int d = 0; d < D; d++) out[at * D + d] = O[d][lane];
      log_sums[at] = most[lane] + std::log(total[lane]);
    }
  }

  void backward(const TreeBlock& b, int64_t h, Scratch& scratch) const {
    alignas(64) float Q[D][16], dO[D][16], rows[16][D];
    float *P = scratch.of(b.count * 32), *dS = P + b.count * 16;
    v16 sums = {}, delta = {}, dQ[D];
    transposed(b, h, q, scale, Q);
    transposed(b, h, d_out, 1.0f, dO);
    for (int64_t lane = 0; lane < lanes_of(b); lane++) {
      const float *x = out + row(b, h, lane) * D, *g = d_out + row(b, h, lane) * D;
      v16 a = {};
      for (int i = 0; i < V; i++) a += load(x + 16 * i) * load(g + 16 * i);
      sums[lane] = log_sums[row(b, h, lane)];
      delta[lane] = sum(a);
    }
    products(b, Q, k + h * D, K * D, P);
    mask(b, P, -1e30f);
    products(b, dO, v + h * D, v_stride, dS);
    for (int64_t p = 0; p < b.count; p++) {
      v16 x = exponential(load(P + p * 16) - sums);
      store(P + p * 16, x);
      store(dS + p * 16, x * (load(dS + p * 16) - delta));
    }
    weighted(b, dS, k + h * D, K * D, dQ);
    for (int64_t lane = 0; lane < lanes_of(b); lane++)
      for (int d = 0; d < D; d++) dq[row(b, h, lane) * D + d] = dQ[d][lane] * scale;
    for (int64_t lane = 0; lane < lanes_of(b); lane++) memcpy(rows[lane], d_out + row(b, h, lane) * D, sizeof rows[0]);
    spread(b, P, rows, dv + h * D, dv_stride);
    for (int64_t lane = 0; lane < lanes_of(b); lane++)
      for (int d = 0; d < D; d++) rows[lane][d] = Q[d][lane];
    spread(b, dS, rows, dk + h * D, K * D);
  }
};

template <int D> void tree_attend(const TreeAttention<D>& a, const std::vector<TreeBlock>& blocks, int threads) {
  int64_t count = blocks.size();
  if (a.d_out) {  // blocks add to the same keys: a head is one thread's
#pragma omp parallel for num_threads(threads) if (threads > 1 && a.K > 1)
    for (int64_t h = 0; h < a.K; h++) {
      Scratch scratch;
      for (const TreeBlock& b : blocks) a.backward(b, h, scratch);
    }
    return;
  }
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (threads > 1 && count * a.K > 16)
  for (int64_t i = 0; i < count * a.K; i++) {
    static thread_local Scratch scratch;
    a.forward(blocks[i % count], i / count, scratch);
  }
}

// Sampling

const int64_t BLOCK_TOKENS = 256;

template <class T> struct Row {
  const T* x; int64_t V; float temperature;
  v16 at(int64_t v) const { return load_some(x + v, V - v, -INFINITY) / temperature; }
  // exp(x / T - most) of the tokens from v on, up to 256 -> their sum in float.
  float weights(int64_t v, float most, float* into) const {
    v16 s = {};
    for (int64_t i = 0; i < BLOCK_TOKENS && v + i < V; i += 16) {
      v16 w = exponential(at(v + i) - most);
      if (into) store(into + i, w);
      s += w;
    }
    return sum(s);
  }
};

// Where running sums first exceed the target, and the sum before that place; a place that adds nothing is never taken.
template <class Get> int64_t find(Get get, int64_t count, double total, double target, double& before) {
  target = std::min(target, std::nextafter(total, 0.0));
  double running = 0;
  int64_t last = 0;
  before = 0;
  for (int64_t i = 0; i < count; i++) {
    double next = running + get(i);
    if (next > target) { before = running; return i; }
    if (next > running) { last = i; before = running; }
    running = next;
  }
  return last;
}

template <class T> void draw(const T* logits, const double* temperature, const double* uniform, int64_t n, int64_t V,
                             int64_t* ids, float* log_probs, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n * V > SMALL)
  for (int64_t i = 0; i < n; i++) {
    static thread_local std::vector<float> parts;
    int64_t count = (V + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    parts.resize(count);
    bool greedy = temperature[i] == 0;
    Row<T> row{logits + i * V, V, greedy ? 1.0f : (float)temperature[i]};
    v16 m = v16{} - INFINITY;
    for (int64_t v = 0; v < V; v += 16) m = larger(m, row.at(v));
    float most = largest(m);
    double total = 0, before, unused;
    for (int64_t b = 0; b < count; b++) total += parts[b] = row.weights(b * BLOCK_TOKENS, most, nullptr);
    int64_t id = 0;
    if (greedy) {
      while (id < V - 1 && row.at(id)[0] != most) id++;
    } else {
      double target = uniform[i] * total;
      int64_t b = find([&](int64_t j) { return (double)parts[j]; }, count, total, target, before);
      float weights[BLOCK_TOKENS];
      row.weights(b * BLOCK_TOKENS, most, weights);
      int64_t inside = std::min(BLOCK_TOKENS, V - b * BLOCK_TOKENS);
      double all = 0;
      for (int64_t j = 0; j < inside; j++) all += weights[j];
      id = b * BLOCK_TOKENS + find([&](int64_t j) { return (double)weights[j]; }, inside, all, target - before, unused);
    }
    ids[i] = id;
    log_probs[i] = row.at(id)[0] - most - (float)std::log(total);
  }
}

}  // namespace

extern "C" {

// Which tokens are attended together. The first `single` tokens decode, one for each row; tokens of a piece follow each
// other in one row. Decoding rows are sorted by their ids [S, M]; neighbours that begin alike form a block where reading
// that beginning once is worth it. Returns the number of blocks (4 numbers each, at most N).
int64_t verl_mt_plan(const int64_t* ids, int64_t width, const int64_t* rows, const int64_t* positions, int64_t single,
                     int64_t N, int64_t G, int64_t D, int64_t* order, int64_t* blocks) {
  std::iota(order, order + N, 0);
  Block* to = (Block*)blocks;
  int64_t count = 0, most = std::max<int64_t>(1, 16 / G);
  auto at = [&](int64_t t) { return ids + rows[t] * width; };
  int64_t all = single ? positions[0] + 1 : 0;
  for (int64_t t = 1; t < single; t++) {
    int64_t n = std::min(all, positions[t] + 1);
    all = std::mismatch(at(0), at(0) + n, at(t)).first - at(0);
  }
  std::sort(order, order + single, [&](int64_t a, int64_t b) {
    int64_t n = std::min(positions[a], positions[b]) + 1;
    int64_t same = std::mismatch(at(a) + all, at(a) + n, at(b) + all).first - at(a);
    if (same < n) return at(a)[same] < at(b)[same];
    return positions[a] != positions[b] ? positions[a] < positions[b] : a < b;
  });
  // cost[i]: of the first i rows. A position costs its bytes, and the products with its key and value.
  double alone = G * (D / 8 + 3.0) + D, lane = 2.0 * D;
  std::vector<double> cost(single + 1, 0.0);
  std::vector<int64_t> start(single + 1, 0), common(single + 1, 0);
  for (int64_t i = 1; i <= single; i++) {
    cost[i] = 1e300;
    int64_t shared = positions[order[i - 1]] + 1;
    double sum = 0;
    for (int64_t j = i - 1; j >= 0 && i - j <= most; j--) {
      int64_t t = order[j];
      if (j < i - 1) {
        int64_t n = std::min(shared, positions[t] + 1), next = order[j + 1];
        shared = n <= all ? n : std::mismatch(at(t) + all, at(t) + n, at(next) + all).first - at(t);
      }
      sum += positions[t] + 1;
      int64_t members = i - j, used = members > 1 || G > 4 ? shared : 0;
      double c = cost[j] + used * lane + (sum - members * used) * alone;
      if (c < cost[i]) { cost[i] = c; start[i] = j; common[i] = used; }
    }
  }
  for (int64_t i = single; i > 0; i = start[i]) to[count++] = {start[i], i, common[i], rows[order[start[i]]]};
  for (int64_t t = single; t < N;) {
    int64_t end = t + 1;
    while (end < N && rows[end] == rows[t] && end - t < most) end++;
    to[count++] = {t, end, positions[end - 1] + 1, rows[t]};
    t = end;
  }
  return count;
}

void verl_mt_norm_back(const float* x, const float* w, const float* g, float* dx, float* dw, int64_t n, int64_t C, float eps,
                       int threads) {
  sum_rows(n, C, dw, threads,
           [=](int64_t i, float* part) { norm_back<true>(x + i * C, w, g + i * C, dx + i * C, part, C, eps); });
}
void verl_mt_silu_multiply_back(const float* both, const float* g, float* dboth, int64_t n, int64_t I, int threads) {
  silu_multiply_back(both, g, dboth, n, I, threads);
}
void verl_mt_rotate(const float* qkv, const float* q_weight, const float* k_weight, const float* cosine, const float* sine,
                    float* q, float* k, int64_t T, int64_t H, int64_t K, int64_t D, float eps, int threads) {
  rotate(qkv, q_weight, k_weight, cosine, sine, q, k, T, H, K, D, eps, threads);
}
void verl_mt_rotate_back(const float* qkv, const float* q_weight, const float* k_weight, const float* cosine,
                         const float* sine, const float* dq, const float* dk, float* dqkv, float* dw, int64_t T, int64_t H,
                         int64_t K, int64_t D, float eps, int threads) {
  rotate_back(qkv, q_weight, k_weight, cosine, sine, dq, dk, dqkv, dw, T, H, K, D, eps, threads);
}

// Attention of packed tokens over the tree of `segments`: where each begins, and which it follows (-1 = none). With
// `d_out` the derivatives dq, and dk and dv, to which they are added.
int verl_mt_tree_attend(const float* q, const float* k, const float* v, float* out, float* log_sums, int64_t H, int64_t K,
                        int64_t D, int64_t v_stride, float scale, const float* d_out, float* dq, float* dk, float* dv,
                        int64_t dv_stride, const int64_t* begins, const int64_t* parents, int64_t segments, int64_t T,
                        int threads) {
  std::vector<TreeBlock> blocks = tree_blocks(begins, parents, segments, T, H / K);
#define CASE(N) \
  case N: tree_attend(TreeAttention<N>{q, k, v, out, log_sums, H, K, v_stride, scale, d_out, dq, dk, dv, dv_stride}, \
                      blocks, threads); return 0;
  switch (D) { CASE(16) CASE(32) CASE(64) CASE(128) }
#undef CASE
  return 1;
}

// A step of all layers, from embedded tokens x [N, C], which are overwritten, to the logits [W, V] of the wanted ones.
// `caches` are keys and values of each layer, [S, K, M, D] each.
int verl_mt_forward(const Decoder* m, float* const* caches, int64_t M, float* x, int64_t N, const int64_t* rows,
                    const int64_t* positions, const int64_t* order, const int64_t* blocks, int64_t num_blocks,
                    const int64_t* wanted, int64_t W, float* logits, float eps, float scale, int threads) {
  const int64_t C = m->C, I = m->I, heads = m->H * m->D, kv_heads = m->K * m->D;
  const int64_t qkv_widths[3] = {heads, kv_heads, kv_heads}, mlp_widths[2] = {I, I};
  auto whole = [](int64_t count) { return (count + 15) & ~(int64_t)15; };  // each buffer begins a cache line
  const int64_t of_x = whole(N * C), of_qkv = whole(N * (heads + 2 * kv_heads)), of_q = whole(N * heads);
  const int64_t of_both = whole(N * 2 * I), of_inside = whole(N * I);
  std::unique_ptr<float[]> memory(new float[of_x + std::max(of_qkv + 2 * of_q, of_both + of_inside) + 16]);
  float* normed = (float*)(((uintptr_t)memory.get() + 63) & ~(uintptr_t)63);
  float *qkv = normed + of_x, *q = qkv + of_qkv, *attended = q + of_q;
  float *both = qkv, *inside = both + of_both;  // attention is done when they are written
  for (int64_t l = 0; l < m->layers; l++) {
    const DecoderLayer& layer = m->layer[l];
    norm<float>(x, layer.input_norm, normed, N, C, eps, threads);
    m->beside(normed, N, layer.qkv, layer.biases, qkv_widths, 3, qkv);
    rotate_and_write<float>(qkv, layer.q_norm, layer.k_norm, m->cosine, m->sine, q, caches[2 * l], caches[2 * l + 1], N,
                            m->H, m->K, m->D, M, rows, positions, eps, threads);
    if (attend_any<float>(q, caches[2 * l], caches[2 * l + 1], attended, m->K, m->H / m->K, m->D, M, rows, positions,
                          order, blocks, num_blocks, scale, threads))
      return 1;
    if (l == m->layers - 1 && W < N) {
      pick(x, C, wanted, W, normed);
      pick(attended, heads, wanted, W, qkv);
      std::swap(x, normed);
      attended = qkv;
      N = W;
    }
    m->product(attended, N, heads, layer.output, C, 1, x, C);
    norm<float>(x, layer.mlp_norm, normed, N, C, eps, threads);
    m->beside(normed, N, layer.gate_up, nullptr, mlp_widths, 2, both);
    silu_multiply<float>(both, inside, N, I, threads);
    m->product(inside, N, I, layer.down, C, 1, x, C);
  }
  norm<float>(x, m->final_norm, normed, N, C, eps, threads);
  m->product(normed, N, C, m->head, m->V, 0, logits, m->V);
  return 0;
}

#define FOR_TYPE(NAME, T) \
  int verl_mt_attend_##NAME(const float* q, const T* keys, const T* values, T* out, int64_t K, int64_t G, int64_t D, \
                            int64_t M, const int64_t* rows, const int64_t* positions, const int64_t* order, \
                            const int64_t* blocks, int64_t num_blocks, float scale, int threads) { \
    return attend_any<T>(q, keys, values, out, K, G, D, M, rows, positions, order, blocks, num_blocks, scale, threads); \
  } \
  void verl_mt_norm_##NAME(const T* x, const T* w, T* y, int64_t n, int64_t C, float eps, int threads) { \
    norm<T>(x, w, y, n, C, eps, threads); \
  } \
  void verl_mt_silu_multiply_##NAME(const T* both, T* y, int64_t n, int64_t I, int threads) { \
    silu_multiply<T>(both, y, n, I, threads); \
  } \
  void verl_mt_rotate_and_write_##NAME(const T* qkv, const T* q_weight, const T* k_weight, const float* cosine, \
                                       const float* sine, float* q, T* keys, T* values, int64_t N, int64_t H, int64_t K, \
                                       int64_t D, int64_t M, const int64_t* rows, const int64_t* positions, float eps, \
                                       int threads) { \
    rotate_and_write<T>(qkv, q_weight, k_weight, cosine, sine, q, keys, values, N, H, K, D, M, rows, positions, eps, \
                        threads); \
  } \
  void verl_mt_draw_##NAME(const T* logits, const double* temperature, const double* uniform, int64_t n, int64_t V, \
                           int64_t* ids, float* log_probs, int threads) { \
    draw<T>(logits, temperature, uniform, n, V, ids, log_probs, threads); \
  }
FOR_TYPE(float32, float)
FOR_TYPE(bfloat16, bf16)
}
