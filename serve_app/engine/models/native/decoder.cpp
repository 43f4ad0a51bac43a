// The forward pass of a llama-like decoder in int8 on the CPU. All of it is one parallel region, in which only barriers
// separate the matrix products.
//
// library.py binds the C functions at the end of this file.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <omp.h>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "int8_matmul.h"

struct Shape {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, num_blocks, block_size;
    float norm_eps;
};

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm may be null
    Matrix qkv, output, gate_up, down;
    uint16_t* cache;  // see PagedCache
    int32_t window;  // tokens that a query sees, including itself; 0: all
};

// Consecutive tokens of one sequence: rows `row .. row + tokens` of the step, the first at `position`.
struct Span {
    const int32_t* table;
    int32_t row, tokens, position;
};

struct Step {
    const int32_t* ids;        // (rows,)
    const int32_t* rope_rows;  // (rows,): rows of the rotary tables
    const Span* spans;
    const int32_t* keep;  // (kept,): rows whose logits are returned, ascending
    float* logits;        // (kept, vocab)
    int32_t rows, num_spans, kept, threads;
};

struct Decoder {
    Shape shape;
    const float* embedding;   // (vocab, hidden)
    const float *cos, *sin;   // (positions, head_dim / 2)
    const float* final_norm;
    const Layer* layers;
    Matrix head;

    // Buffers of the current step: residual stream, projections, result of attention, inner values of the feed-forward.
    std::vector<float> x{}, qkv{}, mixed{}, gated{};
    Rounded rounded{};
    int max_rows = 0;

    void reserve(int rows) {
        if (rows <= max_rows) return;
        max_rows = rows;
        const int attention = shape.heads * shape.head_dim;
        x.resize(size_t(rows) * shape.hidden);
        qkv.resize(size_t(rows) * (attention + 2 * shape.kv_heads * shape.head_dim));
        mixed.resize(size_t(rows) * attention);
        gated.resize(size_t(rows) * shape.intermediate);
        for (int in : {shape.hidden, attention, shape.intermediate}) rounded.reserve(rows, in);
    }

    void run(const Step& step);
};

// x * weight / rms(x)
static inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < n; i++) squares += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(squares / n + eps);
#pragma omp simd
    for (int i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

static inline void rotate(float* x, const float* cos, const float* sin, int half, float scale) {
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * scale;
        x[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

// x * sigmoid(x)
static inline Scaled silu(Scaled x) {
    float values[kLanes];
    std::memcpy(values, &x, sizeof x);
#pragma omp simd
    for (int i = 0; i < kLanes; i++) {
        const float e = exp_of_negative(-std::fabs(values[i]));
        values[i] *= (values[i] >= 0 ? 1.0f : e) / (1.0f + e);
    }
    std::memcpy(&x, values, sizeof x);
    return x;
}

// Tokens of one tile of queries: enough to make the conversion of the keys cheap, and few enough to fit the cache.
static inline int tile_tokens(int heads_per_kv) { return std::max(1, 96 / heads_per_kv); }

void Decoder::run(const Step& step) {
    const Shape& s = shape;
    const int half = s.head_dim / 2, group = s.heads / s.kv_heads, attention = s.heads * s.head_dim;
    const int qkv_width = attention + 2 * s.kv_heads * s.head_dim, tile = tile_tokens(group);
    const float scale = 1.0f / std::sqrt(float(s.head_dim));
    reserve(step.rows);

    struct Tile {
        int span, from, tokens;
    };
    std::vector<Tile> tiles;
    for (int i = 0; i < step.num_spans; i++)
        for (int from = 0; from < step.spans[i].tokens; from += tile)
            tiles.push_back({i, from, std::min(tile, step.spans[i].tokens - from)});
    // The longest tiles first, so that no thread gets a long tile at the end.
    std::sort(tiles.begin(), tiles.end(), [&](const Tile& a, const Tile& b) {
        const auto cost = [&](const Tile& t) {
            return int64_t(t.tokens) * (step.spans[t.span].position + t.from + t.tokens);
        };
        return cost(a) > cost(b);
    });
    std::vector<int> span_of(step.rows);
    for (int i = 0; i < step.num_spans; i++)
        std::fill_n(span_of.begin() + step.spans[i].row, step.spans[i].tokens, i);

    const int num_tiles = int(tiles.size());
#pragma omp parallel num_threads(step.threads)
    {
        const int threads = omp_get_num_threads();
        AttentionScratch scratch(tile * group, s.head_dim);
        std::vector<float> tile_q(size_t(tile) * group * s.head_dim), tile_out(tile_q.size()), normed(s.hidden);
#pragma omp for
        for (int r = 0; r < step.rows; r++)
            std::memcpy(&x[size_t(r) * s.hidden], embedding + int64_t(step.ids[r]) * s.hidden, s.hidden * sizeof(float));

        int rows = step.rows;
        const auto add_to_residual = [&](const Matrix& m) {
            matmul(rounded, rows, m, [&](int r, int panel, Scaled first, Scaled second) {
                float* to = &x[size_t(r) * s.hidden];
                const int column = panel * kLanes;
                put_columns(to, column, s.hidden, first + columns(to, column, s.hidden));
                put_columns(to, column + kLanes, s.hidden, second + columns(to, column + kLanes, s.hidden));
            });
        };
        const auto norm_and_round = [&](const float* weight) {
#pragma omp for
            for (int r = 0; r < rows; r++) {
                rms_norm(&x[size_t(r) * s.hidden], weight, s.norm_eps, s.hidden, normed.data());
                rounded.round_row(r, normed.data(), s.hidden);
            }
        };

        for (int l = 0; l < s.layers; l++) {
            const Layer& layer = layers[l];
            const PagedCache cache{layer.cache, s.num_blocks, s.block_size, s.head_dim};
            norm_and_round(layer.input_norm);
            matmul(rounded, rows, layer.qkv, [&](int r, int panel, Scaled first, Scaled second) {
                float* to = &qkv[size_t(r) * qkv_width];
                put_columns(to, panel * kLanes, qkv_width, first);
                put_columns(to, (panel + 1) * kLanes, qkv_width, second);
            });

#pragma omp for
            for (int r = 0; r < rows; r++) {
                float* q = &qkv[size_t(r) * qkv_width];
                float* k = q + attention;
                const float* v = k + s.kv_heads * s.head_dim;
                const float *c = cos + int64_t(step.rope_rows[r]) * half, *n = sin + int64_t(step.rope_rows[r]) * half;
                for (int h = 0; h < s.heads; h++) {
                    float* head = q + h * s.head_dim;
                    if (layer.q_norm) rms_norm(head, layer.q_norm, s.norm_eps, s.head_dim, head);
                    rotate(head, c, n, half, scale);
                }
                const Span& span = step.spans[span_of[r]];
                const int at = span.position + r - span.row;
                for (int h = 0; h < s.kv_heads; h++) {
                    float* head = k + h * s.head_dim;
                    if (layer.k_norm) rms_norm(head, layer.k_norm, s.norm_eps, s.head_dim, head);
                    rotate(head, c, n, half, 1.0f);
                    cache.put(span.table[at / s.block_size], at % s.block_size, h, head, v + h * s.head_dim);
                }
            }

#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < num_tiles * s.kv_heads; task++) {
                const Tile& t = tiles[task / s.kv_heads];
                const Span& span = step.spans[t.span];
                const int h = task % s.kv_heads, row = span.row + t.from, width = group * s.head_dim;
                for (int i = 0; i < t.tokens; i++)
                    std::memcpy(&tile_q[size_t(i) * width], &qkv[size_t(row + i) * qkv_width + h * width],
                                width * sizeof(float));
                Stretch next{};
                if (task + threads < num_tiles * s.kv_heads) {
                    const Tile& n = tiles[(task + threads) / s.kv_heads];
                    const Span& of = step.spans[n.span];
                    const int position = of.position + n.from;
                    const int from = layer.window && position >= layer.window ? position - layer.window + 1 : 0;
                    next = {of.table, (task + threads) % s.kv_heads, from / kChunk * kChunk, position + n.tokens};
                }
                attend(cache, span.table, h, span.position + t.from, t.tokens, group, layer.window, tile_q.data(),
                       tile_out.data(), next, scratch);
                for (int i = 0; i < t.tokens; i++)
                    std::memcpy(&mixed[size_t(row + i) * attention + h * width], &tile_out[size_t(i) * width],
                                width * sizeof(float));
            }

            if (l == s.layers - 1) {  // the rest of the last layer is needed only for the kept rows
                rows = step.kept;
#pragma omp single
                for (int i = 0; i < rows; i++) {
                    const int from = step.keep[i];
                    if (from == i) continue;
                    std::memcpy(&x[size_t(i) * s.hidden], &x[size_t(from) * s.hidden], s.hidden * sizeof(float));
                    std::memcpy(&mixed[size_t(i) * attention], &mixed[size_t(from) * attention],
                                attention * sizeof(float));
                }
            }
#pragma omp for
            for (int r = 0; r < rows; r++) rounded.round_row(r, &mixed[size_t(r) * attention], attention);
            add_to_residual(layer.output);
            norm_and_round(layer.post_norm);
            matmul(rounded, rows, layer.gate_up, [&](int r, int panel, Scaled gate, Scaled up) {
                put_columns(&gated[size_t(r) * s.intermediate], panel / 2 * kLanes, s.intermediate, silu(gate) * up);
            });
#pragma omp for
            for (int r = 0; r < rows; r++) rounded.round_row(r, &gated[size_t(r) * s.intermediate], s.intermediate);
            add_to_residual(layer.down);
        }

        norm_and_round(final_norm);
        matmul(rounded, rows, head, [&](int r, int panel, Scaled first, Scaled second) {
            float* to = step.logits + int64_t(r) * s.vocab;
            put_columns(to, panel * kLanes, s.vocab, first);
            put_columns(to, (panel + 1) * kLanes, s.vocab, second);
        });
    }
}

extern "C" {
const char* native_isa() { return kIsa; }
int32_t native_lanes() { return kLanes; }
int64_t native_packed_size(int32_t out, int32_t in) { return packed_size(out, in); }
void native_pack(const int8_t* values, int32_t out, int32_t in, uint8_t* panels) { pack(values, out, in, panels); }
Decoder* native_decoder(const Shape* shape, const float* embedding, const float* cos, const float* sin,
                        const float* final_norm, const Layer* layers, const Matrix* head) {
    return new Decoder{*shape, embedding, cos, sin, final_norm, layers, *head};
}
void native_run(Decoder* decoder, const Step* step) { decoder->run(*step); }
void native_draw(const Draw* what) { draw(*what); }
void native_free(Decoder* decoder) { delete decoder; }
}
