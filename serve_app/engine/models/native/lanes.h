// Vectors of the target machine: the compiler's vector types for floats, and intrinsics for the dot product of four
// bytes per lane and for half precision.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Floats __attribute__((vector_size(kFloats * 4)));
typedef int32_t Ints __attribute__((vector_size(kFloats * 4)));

static inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// Lanes of the byte dot product; a lane is one column of a matrix product and holds an exact 32-bit sum.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int kLanes = 16;
constexpr const char* kIsa = "avx512-vnni";
typedef __m512i Bytes;
typedef Ints Sums;
constexpr bool kOffsetWeights = true;  // weights are stored as w + 128: the instruction takes one unsigned operand
static inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes four(int32_t x) { return _mm512_set1_epi32(x); }
static inline Sums dot(Sums s, Bytes w, Bytes x) { return (Sums)_mm512_dpbusd_epi32((__m512i)s, w, x); }
#elif defined(__AVXVNNI__)
constexpr int kLanes = 8;
constexpr const char* kIsa = "avx-vnni";
typedef __m256i Bytes;
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr bool kOffsetWeights = true;
static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Bytes four(int32_t x) { return _mm256_set1_epi32(x); }
static inline Sums dot(Sums s, Bytes w, Bytes x) { return (Sums)_mm256_dpbusd_avx_epi32((__m256i)s, w, x); }
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr const char* kIsa = "avx2";
typedef __m256i Bytes;
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr bool kOffsetWeights = false;
static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Bytes four(int32_t x) { return _mm256_set1_epi32(x); }
static inline Sums dot(Sums s, Bytes w, Bytes x) {
    // |w| * (x with w's sign): a pair of products is at most 2 * 127 * 127 and never saturates 16 bits.
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return (Sums)_mm256_add_epi32((__m256i)s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
constexpr int kLanes = 8;
constexpr const char* kIsa = "portable";
struct Bytes { int8_t b[32]; };
typedef int32_t Sums __attribute__((vector_size(32)));
constexpr bool kOffsetWeights = false;
static inline Bytes load_bytes(const uint8_t* p) { Bytes v; std::memcpy(&v, p, 32); return v; }
static inline Bytes four(int32_t x) { Bytes v; for (int i = 0; i < 8; i++) std::memcpy(v.b + 4 * i, &x, 4); return v; }
static inline Sums dot(Sums s, Bytes w, Bytes x) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) s[i] += int(w.b[4 * i + j]) * int(x.b[4 * i + j]);
    return s;
}
#endif
typedef float Scaled __attribute__((vector_size(kLanes * 4)));

// Converts `n` half-precision values, the KV cache's type, to floats.
static inline void halves_to_floats(const uint16_t* from, float* to, int n) {
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
    for (; i < n; i++) {
        _Float16 h;
        std::memcpy(&h, from + i, 2);
        to[i] = float(h);
    }
}

static inline Floats load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    Floats v;
    float floats[kFloats];
    halves_to_floats(p, floats, kFloats);
    std::memcpy(&v, floats, sizeof v);
    return v;
#endif
}

static inline uint16_t to_half(float x) {
    _Float16 h = (_Float16)x;
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

// e^x for x <= 0, close to float precision (Cody-Waite reduction, a polynomial of degree 6), simple enough for the
// compiler to vectorise in any loop. 0 below -87; NaN stays NaN.
__attribute__((always_inline)) static inline float exp_of_negative(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : p * power;
}
