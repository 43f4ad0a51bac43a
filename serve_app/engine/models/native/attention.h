// Attention of one tile of queries over one sequence's paged keys and values, with the online softmax of
// FlashAttention (arXiv 2205.14135): 64 tokens at a time, so that scores stay in the first-level cache.
//
// Within a block of one head, keys are stored as (size, token), so that scores are products of rows without sums across
// a vector. Values are stored as (token, size). Both are half-precision floats (IEEE 754).
#pragma once
#include <cmath>
#include <type_traits>
#include <vector>

#include "lanes.h"

constexpr int kChunk = 64;  // tokens at a time

// The keys and values of tokens `from .. end` of one sequence.
struct Stretch {
    const int32_t* table;
    int kv_head, from, end;
};

// Prefetches the blocks that are read next, a few cache lines at a time during other work. All at once, the prefetches
// would delay the current reads.
struct Ahead {
    const char* blocks[kChunk];
    int count = 0, step = 0;  // number of blocks; bytes of a block per element of a head

    void fetch(int i) const {
        for (int b = 0; b < count; b++)
            for (int at = 0; at < step; at += 64) __builtin_prefetch(blocks[b] + i * step + at, 0, 2);
    }
};

struct PagedCache {
    uint16_t* blocks;  // (head, block, keys then values): neighbouring blocks of a sequence are read in one pass
    int32_t num_blocks, block_size, head_dim;

    uint16_t* keys(int block, int kv_head) const {
        return blocks + (int64_t(kv_head) * num_blocks + block) * 2 * head_dim * block_size;
    }

    uint16_t* values(int block, int kv_head) const { return keys(block, kv_head) + head_dim * block_size; }

    // The blocks of the first kChunk tokens of `next`.
    Ahead ahead(const Stretch& next) const {
        Ahead a;
        a.step = block_size * 4;
        const int end = next.end < next.from + kChunk ? next.end : next.from + kChunk;
        for (int t = next.from; t < end; t += block_size)
            a.blocks[a.count++] = (const char*)keys(next.table[t / block_size], next.kv_head);
        return a;
    }

    void put(int block, int slot, int kv_head, const float* key, const float* value) const {
        uint16_t* k = keys(block, kv_head) + slot;
        uint16_t* v = values(block, kv_head) + slot * head_dim;
        for (int i = 0; i < head_dim; i++) k[i * block_size] = to_half(key[i]);
        for (int i = 0; i < head_dim; i++) v[i] = to_half(value[i]);
    }

    // Reads tokens `from .. from + n` of one sequence, n <= kChunk, to (size, kChunk) and (kChunk, size). Keys and
    // values beyond n are set to zero, so that stale content of a block has no effect.
    void read(const int32_t* table, int kv_head, int from, int n, const Ahead& ahead, float* key, float* value) const {
        int done = 0;
        while (done < n) {
            const int block = table[(from + done) / block_size], slot = (from + done) % block_size;
            const int take = block_size - slot < n - done ? block_size - slot : n - done;
            const uint16_t *k = keys(block, kv_head) + slot, *v = values(block, kv_head) + slot * head_dim;
            for (int i = 0; i < head_dim; i++) {
                halves_to_floats(k + i * block_size, key + i * kChunk + done, take);
                if (done == 0) ahead.fetch(i);
            }
            halves_to_floats(v, value + done * head_dim, take * head_dim);
            done += take;
        }
        if (n == kChunk) return;
        for (int i = 0; i < head_dim; i++) std::memset(key + i * kChunk + n, 0, (kChunk - n) * sizeof(float));
        std::memset(value + n * head_dim, 0, (kChunk - n) * head_dim * sizeof(float));
    }
};

// c (R, V vectors) = [c +] a (R, k) * b (k, V vectors)
template <int R, int V>
static inline void product_tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k, bool add) {
    Floats sum[R][V] = {};
    if (add)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] = load(c + r * ldc + v * kFloats);
    for (int i = 0; i < k; i++) {
        Floats row[V];
        for (int v = 0; v < V; v++) row[v] = load(b + int64_t(i) * ldb + v * kFloats);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sum[r][v] += row[v] * a[r * lda + i];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(c + r * ldc + v * kFloats, sum[r][v]);
}

#if defined(__AVX512F__)
constexpr int kProductVectors = 4, kProductRows = 6;
#else
constexpr int kProductVectors = 2, kProductRows = 4;
#endif

template <int R>
static inline void product_rows(
    int cols, const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k, bool add) {
    int j = 0;
    for (; j + kProductVectors * kFloats <= cols; j += kProductVectors * kFloats)
        product_tile<R, kProductVectors>(a, lda, b + j, ldb, c + j, ldc, k, add);
    for (; j < cols; j += kFloats) product_tile<R, 1>(a, lda, b + j, ldb, c + j, ldc, k, add);
}

template <int R>
static inline void product_rest(int rest, int cols, const float* a, int lda, const float* b, int ldb, float* c,
                                int ldc, int k, bool add) {
    if constexpr (R > 0) {
        if (rest == R) product_rows<R>(cols, a, lda, b, ldb, c, ldc, k, add);
        else product_rest<R - 1>(rest, cols, a, lda, b, ldb, c, ldc, k, add);
    }
}

// c (rows, cols) = [c +] a (rows, k) * b (k, cols); cols is a multiple of kFloats
static inline void product(
    int rows, int cols, const float* a, int lda, const float* b, int ldb, float* c, int ldc, int k, bool add) {
    int r = 0;
    for (; r + kProductRows <= rows; r += kProductRows)
        product_rows<kProductRows>(cols, a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
    product_rest<kProductRows - 1>(rows - r, cols, a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
}

// Computes the scores (R, kChunk) of R queries (R, size) with n tokens of one sequence, from token `from` on. Reads
// half-precision keys directly; converting them first is faster only for many queries. Scores beyond n have no meaning.
// Sums are computed in the same order as in `product`, so that scores have the same bits.
template <int R>
static inline void scores_of_few(const PagedCache& cache, const int32_t* table, int kv_head, int from, int n,
                                 const float* q, float* scores, const Ahead* ahead) {
    constexpr int V = kProductVectors;
    const int size = cache.head_dim, stride = cache.block_size;
    for (int at = 0; at < n; at += V * kFloats) {
        const uint16_t* k[V];
        for (int v = 0; v < V; v++) {
            const int token = from + (at + v * kFloats < n ? at + v * kFloats : at);
            k[v] = cache.keys(table[token / stride], kv_head) + token % stride;
        }
        Floats sum[R][V] = {};
        for (int i = 0; i < size; i++) {
            Floats row[V];
            for (int v = 0; v < V; v++) row[v] = load_halves(k[v] + int64_t(i) * stride);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) sum[r][v] += row[v] * q[r * size + i];
            if (ahead && at == 0) ahead->fetch(i);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(scores + r * kChunk + at + v * kFloats, sum[r][v]);
    }
}

// out (R, size) += weights (R, kChunk) * values of n tokens of one sequence from token `from` on.
template <int R>
static inline void add_values_of_few(const PagedCache& cache, const int32_t* table, int kv_head, int from, int n,
                                     const float* weights, float* out) {
    constexpr int V = kProductVectors;
    const int size = cache.head_dim, stride = cache.block_size;
    for (int at = 0; at < size; at += V * kFloats) {
        const int last = size - at < V * kFloats ? (size - at) / kFloats : V;
        Floats sum[R][V] = {};
        for (int r = 0; r < R; r++)
            for (int v = 0; v < last; v++) sum[r][v] = load(out + r * size + at + v * kFloats);
        for (int done = 0; done < n;) {
            const int token = from + done, slot = token % stride;
            const int take = stride - slot < n - done ? stride - slot : n - done;
            const uint16_t* value = cache.values(table[token / stride], kv_head) + slot * size + at;
            for (int t = 0; t < take; t++, value += size) {
                Floats row[V] = {};
                for (int v = 0; v < V; v++)
                    if (v < last) row[v] = load_halves(value + v * kFloats);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < V; v++) sum[r][v] += row[v] * weights[r * kChunk + done + t];
            }
            done += take;
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < last; v++) store(out + r * size + at + v * kFloats, sum[r][v]);
    }
}

// Calls `call` with the number of rows, at most Max, as a constant: `call(std::integral_constant<int, rows>)`.
template <int Max, class Call>
static inline void with_rows(int rows, const Call& call) {
    if constexpr (Max > 0) {
        if (rows >= Max) call(std::integral_constant<int, Max>());
        else with_rows<Max - 1>(rows, call);
    }
}

constexpr int kFewRows = 2 * kProductRows;

struct AttentionScratch {
    std::vector<float> key, value, scores, top, sum;

    AttentionScratch(int rows, int head_dim)
        : key(kChunk * head_dim), value(kChunk * head_dim), scores(rows * kChunk), top(rows), sum(rows) {}
};

// Attention of `tokens` consecutive tokens from `position` on, each with `heads` query heads that share one key head.
// The queries are the rows (token, head) of `q` (rows, size), already scaled. Writes `out` (rows, size). `next` is the
// stretch that this thread reads next; its first blocks are prefetched.
static inline void attend(const PagedCache& cache, const int32_t* table, int kv_head, int position, int tokens,
                          int heads, int window, const float* q, float* out, const Stretch& next,
                          AttentionScratch& scratch) {
    const int size = cache.head_dim, rows = tokens * heads, end = position + tokens;
    float *scores = scratch.scores.data(), *top = scratch.top.data(), *sum = scratch.sum.data();
    for (int r = 0; r < rows; r++) top[r] = -1e30f, sum[r] = 0;
    std::memset(out, 0, size_t(rows) * size * sizeof(float));
    const bool few = rows <= kFewRows && cache.block_size % kFloats == 0 && size % kFloats == 0;
    const int first = window && position - window + 1 > 0 ? (position - window + 1) / kChunk * kChunk : 0;
    for (int from = first; from < end; from += kChunk) {
        const int n = end - from < kChunk ? end - from : kChunk;
        const Ahead ahead = cache.ahead(from + kChunk < end ? Stretch{table, kv_head, from + kChunk, end} : next);
        if (few) {
            for (int r = 0; r < rows; r += kProductRows)
                with_rows<kProductRows>(rows - r, [&](auto count) {
                    scores_of_few<count>(cache, table, kv_head, from, n, q + r * size, scores + r * kChunk,
                                         r == 0 ? &ahead : nullptr);
                });
        } else {
            cache.read(table, kv_head, from, n, ahead, scratch.key.data(), scratch.value.data());
            product(rows, kChunk, q, size, scratch.key.data(), kChunk, scores, kChunk, size, false);
        }
        for (int r = 0; r < rows; r++) {
            float* s = scores + r * kChunk;
            const int at = position + r / heads;
            const int visible = at - from + 1 < kChunk ? at - from + 1 : kChunk;
            const int hidden = window && at - window + 1 > from ? at - window + 1 - from : 0;
            for (int t = visible < 0 ? 0 : visible; t < kChunk; t++) s[t] = -1e30f;
            for (int t = 0; t < hidden && t < kChunk; t++) s[t] = -1e30f;
            float best = top[r];
#pragma omp simd reduction(max : best)
            for (int t = 0; t < kChunk; t++) best = s[t] > best ? s[t] : best;
            if (best <= -1e30f) {  // nothing visible yet
                std::memset(s, 0, kChunk * sizeof(float));
                continue;
            }
            float total = 0;
#pragma omp simd reduction(+ : total)
            for (int t = 0; t < kChunk; t++) {
                s[t] = exp_of_negative(s[t] - best);
                total += s[t];
            }
            if (best > top[r]) {
                const float shrink = exp_of_negative(top[r] - best);
                sum[r] *= shrink;
                float* o = out + int64_t(r) * size;
#pragma omp simd
                for (int i = 0; i < size; i++) o[i] *= shrink;
                top[r] = best;
            }
            sum[r] += total;
        }
        if (few) {
            for (int r = 0; r < rows; r += kProductRows)
                with_rows<kProductRows>(rows - r, [&](auto count) {
                    add_values_of_few<count>(cache, table, kv_head, from, n, scores + r * kChunk, out + r * size);
                });
        } else {
            product(rows, size, scores, kChunk, scratch.value.data(), size, out, size, n, true);
        }
    }
    for (int r = 0; r < rows; r++) {
        const float inverse = 1.0f / sum[r];
        float* o = out + int64_t(r) * size;
#pragma omp simd
        for (int i = 0; i < size; i++) o[i] *= inverse;
    }
}
