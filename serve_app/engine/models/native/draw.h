// Draws tokens by temperature, with all passes over the logits in one function. serve_app/engine/sampling/draw.py does
// the same in torch, and adds top-k, top-p and min-p.
//
// A row's results have the same bits in any batch and with any number of threads.
#pragma once
#include "lanes.h"

constexpr int kBlock = 128;  // tokens, as in draw.py
constexpr int64_t kInvalid = -1, kDeadEnd = -2;
constexpr double kBelowOne = 1 - 1e-12;

// Rows of logits and the results.
struct Draw {
    float* logits;           // (rows, blocks, kBlock); replaced by weights in rows with a steepness other than 0
    float *peaks, *sums;     // (rows, blocks)
    const float* steepness;  // (rows,); 0 takes the most likely token
    const double* uniform;   // (rows,), in [0, 1)
    int64_t* tokens;         // (rows,)
    float* drawn;            // (rows,): the tokens' weights
    int64_t rows, blocks;
    float least;  // weights up to this become 0
    int32_t threads;
};

// The largest value of a block; NaN if the block contains NaN.
static inline float largest(const float* block) {
    Floats most = load(block);
    Ints odd = most != most;
    for (int i = kFloats; i < kBlock; i += kFloats) {
        const Floats v = load(block + i);
        odd |= v != v;
        most = v > most ? v : most;
    }
    float result = most[0];
    int32_t any = odd[0];
    for (int i = 1; i < kFloats; i++) {
        result = most[i] > result ? most[i] : result;
        any |= odd[i];
    }
    return any ? __builtin_nanf("") : result;
}

// Turns a block into weights; returns their sum.
static inline float weigh(float* block, float best, float steepness, float least) {
    for (int i = 0; i < kBlock; i++) {
        const float weight = exp_of_negative((block[i] - best) * steepness);
        block[i] = weight > least ? weight : 0.0f;
    }
    Floats sum = load(block);
    for (int i = kFloats; i < kBlock; i += kFloats) sum += load(block + i);
    float total = 0.0f;
    for (int i = 0; i < kFloats; i++) total += sum[i];
    return total;
}

// The index at which the running sum of `values` passes `target`; reduces `target` by the sum before that index.
static inline int64_t passes(const float* values, int64_t count, double& target) {
    double before = 0.0;
    for (int64_t i = 0; i < count - 1; i++) {
        const double after = before + values[i];
        if (after > target) {
            target -= before;
            return i;
        }
        before = after;
    }
    target -= before;
    return count - 1;
}

static double total(const float* values, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += values[i];
    return sum;
}

static void draw_row(const Draw& d, int64_t r) {
    float *row = d.logits + r * d.blocks * kBlock, *peaks = d.peaks + r * d.blocks, *sums = d.sums + r * d.blocks;
    bool is_number = true;
    int64_t first = 0;
    for (int64_t b = 0; b < d.blocks; b++) {
        peaks[b] = largest(row + b * kBlock);
        is_number &= peaks[b] == peaks[b];
        if (peaks[b] > peaks[first]) first = b;
    }
    const float best = peaks[first];
    d.drawn[r] = 1.0f;
    if (!is_number || best == __builtin_inff()) {
        d.tokens[r] = kInvalid;
        return;
    }
    if (best == -__builtin_inff()) {
        d.tokens[r] = kDeadEnd;
        return;
    }
    if (d.steepness[r] == 0.0f) {
        int64_t token = first * kBlock;
        while (row[token] != best) token++;
        d.tokens[r] = token;
        return;
    }
    for (int64_t b = 0; b < d.blocks; b++) {
        sums[b] = weigh(row + b * kBlock, best, d.steepness[r], d.least);
        peaks[b] = largest(row + b * kBlock);
    }
    double target = d.uniform[r] * total(sums, d.blocks) * kBelowOne;
    const int64_t block = passes(sums, d.blocks, target);
    const float* part = row + block * kBlock;
    // This sum may be rounded differently from the block's entry in `sums`.
    const double limit = total(part, kBlock) * kBelowOne;
    if (target > limit) target = limit;
    d.tokens[r] = block * kBlock + passes(part, kBlock, target);
    d.drawn[r] = row[d.tokens[r]];
}

static void draw(const Draw& d) {
#pragma omp parallel for num_threads(d.threads) if (d.threads > 1)
    for (int64_t r = 0; r < d.rows; r++) draw_row(d, r);
}
