// Matrix products of int8 activations and int8 weights. Sums over a group of kGroup inputs are exact, in 32 bits. Each
// group of a token has a scale, and each output has a scale.
#pragma once
#include <cmath>
#include <vector>

#include "lanes.h"

constexpr int kGroup = 64;
constexpr int kStep = 2 * kLanes * 4;  // bytes of four inputs in a pair of panels

// A matrix (out, in) in pairs of panels of kLanes outputs. Within a pair, four inputs of every output are side by side,
// so that a product reads memory in one direction.
struct Matrix {
    const uint8_t* panels;
    const float* scales;  // per output
    const float* bias;    // per output, or null
    int32_t out, in;
};

static inline int groups_of(int in) { return (in + kGroup - 1) / kGroup; }
static inline int panels_of(int out) { return (out + 2 * kLanes - 1) / (2 * kLanes) * 2; }  // always pairs
static inline int padded(int in) { return (in + 3) / 4 * 4; }

// Bytes of a packed matrix, and the function that packs it. Rows beyond `out` and inputs beyond `in` are zeros.
static inline int64_t packed_size(int out, int in) { return int64_t(panels_of(out)) * kLanes * padded(in); }

static inline void pack(const int8_t* values, int out, int in, uint8_t* panels) {
    const uint8_t zero = kOffsetWeights ? 128 : 0;
    const int width = padded(in);
#pragma omp parallel for
    for (int panel = 0; panel < panels_of(out); panel++) {
        uint8_t* to = panels + int64_t(panel / 2) * 2 * kLanes * width + panel % 2 * (kStep / 2);
        for (int k = 0; k < width; k++)
            for (int lane = 0; lane < kLanes; lane++) {
                int row = panel * kLanes + lane;
                uint8_t w = row < out && k < in ? uint8_t(values[int64_t(row) * in + k]) + zero : zero;
                to[(k / 4) * kStep + lane * 4 + k % 4] = w;
            }
    }
}

// Activations of some tokens, rounded to int8.
struct Rounded {
    std::vector<int8_t> values;   // (rows, padded(in))
    std::vector<float> scales;    // (rows, groups)
    std::vector<int32_t> starts;  // (rows, groups): a group's sum starts from this, which cancels the weights' offset

    void reserve(int rows, int in) {
        values.resize(size_t(rows) * padded(in) + 64);
        scales.resize(size_t(rows) * groups_of(in));
        starts.resize(size_t(rows) * groups_of(in));
    }

    void round_row(int row, const float* x, int in) {
        int8_t* to = values.data() + size_t(row) * padded(in);
        for (int g = 0; g < groups_of(in); g++) {
            const int begin = g * kGroup, n = in - begin < kGroup ? in - begin : kGroup;
            float top = 0;
            #pragma omp simd reduction(max : top)
            for (int i = 0; i < n; i++) {
                float a = std::fabs(x[begin + i]);
                top = a > top ? a : top;
            }
            float check = 0;
#pragma omp simd reduction(+ : check)
            for (int i = 0; i < n; i++) check += x[begin + i] * 0.0f;
            const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < n; i++) {
                int32_t q = int32_t(__builtin_rintf(x[begin + i] * inverse));
                to[begin + i] = int8_t(q);
                sum += q;
            }
            scales[size_t(row) * groups_of(in) + g] = top / 127.0f + check;
            starts[size_t(row) * groups_of(in) + g] = kOffsetWeights ? -128 * sum : 0;
        }
        for (int k = in; k < padded(in); k++) to[k] = 0;
    }
};

static inline Scaled columns(const float* from, int column, int out) {
    Scaled v = {};
    if (column + kLanes <= out) std::memcpy(&v, from + column, sizeof v);
    else if (column < out) std::memcpy(&v, from + column, (out - column) * sizeof(float));
    return v;
}

static inline void put_columns(float* to, int column, int out, Scaled v) {
    if (column + kLanes <= out) std::memcpy(to + column, &v, sizeof v);
    else if (column < out) std::memcpy(to + column, &v, (out - column) * sizeof(float));
}

// R tokens times a pair of panels; `write(token, panel, first, second)` receives the results, scaled and with bias.
// Prefetches `lines` cache lines from `ahead` on, a few at a time.
template <int R, class Write>
static inline void matmul_tile(const Rounded& x, int row, const Matrix& m, int panel, const Write& write,
                               const uint8_t* ahead = nullptr, int lines = 0) {
    const int width = padded(m.in), groups = groups_of(m.in);
    const uint8_t* w = m.panels + int64_t(panel) * kLanes * width;
    const int8_t* xs = x.values.data() + size_t(row) * width;
    const float* scales = x.scales.data() + size_t(row) * groups;
    const int32_t* starts = x.starts.data() + size_t(row) * groups;
    const int lines_a_group = (lines + groups - 1) / groups;
    Scaled total[R][2] = {};
    for (int g = 0; g < groups; g++) {
        for (int i = 0; i < lines_a_group; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        Sums sum[R][2];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++) sum[r][c] = Sums{} + starts[r * groups + g];
        const int end = (g + 1) * kGroup < width ? (g + 1) * kGroup : width;
#pragma GCC unroll 4
        for (int k = g * kGroup; k < end; k += 4) {
            Bytes weights[2];
            for (int c = 0; c < 2; c++) weights[c] = load_bytes(w + k / 4 * kStep + c * (kStep / 2));
            for (int r = 0; r < R; r++) {
                int32_t quad;
                std::memcpy(&quad, xs + size_t(r) * width + k, 4);
                const Bytes bytes = four(quad);
                for (int c = 0; c < 2; c++) sum[r][c] = dot(sum[r][c], weights[c], bytes);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 2; c++)
                total[r][c] += __builtin_convertvector(sum[r][c], Scaled) * scales[r * groups + g];
    }
    const int column = panel * kLanes;
    Scaled scale[2], bias[2] = {};
    for (int c = 0; c < 2; c++) {
        scale[c] = columns(m.scales, column + c * kLanes, m.out);
        if (m.bias) bias[c] = columns(m.bias, column + c * kLanes, m.out);
    }
    for (int r = 0; r < R; r++)
        write(row + r, panel, total[r][0] * scale[0] + bias[0], total[r][1] * scale[1] + bias[1]);
}

#if defined(__AVX512F__)
constexpr int kRowTile = 6;  // 32 registers: two sums and two totals a row
#else
constexpr int kRowTile = 3;  // 16 registers
#endif

template <int R, class Write>
static inline void matmul_rest(const Rounded& x, int row, int rest, const Matrix& m, int panel, const Write& write,
                               const uint8_t* ahead, int lines) {
    if constexpr (R > 0) {
        if (rest == R) matmul_tile<R>(x, row, m, panel, write, ahead, lines);
        else matmul_rest<R - 1>(x, row, rest, m, panel, write, ahead, lines);
    }
}

// The whole product of `rows` tokens, divided among the threads of the enclosing parallel region; ends with a barrier.
// A pair of panels stays in the first-level cache for all tokens, while the next pair is fetched.
template <class Write>
static void matmul(const Rounded& x, int rows, const Matrix& m, const Write& write) {
    const int panels = panels_of(m.out);
    const int64_t pair = int64_t(2) * kLanes * padded(m.in);
    const int tiles = (rows + kRowTile - 1) / kRowTile, lines = int(pair / 64 / (tiles ? tiles : 1)) + 1;
#pragma omp for schedule(dynamic, 2)
    for (int panel = 0; panel < panels; panel += 2) {
        const uint8_t* ahead = m.panels + (panel / 2 + 1) * pair;
        int row = 0;
        for (; row + kRowTile < rows; row += kRowTile, ahead += int64_t(lines) * 64)
            matmul_tile<kRowTile>(x, row, m, panel, write, ahead, lines);
        matmul_rest<kRowTile>(x, row, rows - row, m, panel, write, ahead, lines);
    }
}
