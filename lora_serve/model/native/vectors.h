/* Vectors of LANES floats as both GCC and Clang know them; longer ones than the processor's are cut by the compiler. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifndef LANES /* given from outside in tests */
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define ALWAYS static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 16")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__}) /* GCC has the other from 12 on only */
#endif

ALWAYS vec load(const float *p) { return *(const vec *)p; }
ALWAYS void store(float *p, vec v) { *(vec *)p = v; }
ALWAYS vec splat(float v) { return v - (vec){}; }
/* Lanes of two vectors, taken in turns (UNZIP) and put back (ZIP): element i of `even` is element 2 i of a and b. */
#if LANES == 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define FIRSTS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LASTS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#define FIRSTS 0, 8, 1, 9, 2, 10, 3, 11
#define LASTS 4, 12, 5, 13, 6, 14, 7, 15
#endif
#define UNZIP(a, b, even, odd) const vec even = SHUFFLE(a, b, EVENS), odd = SHUFFLE(a, b, ODDS)
#define ZIP(even, odd, a, b) const vec a = SHUFFLE(even, odd, FIRSTS), b = SHUFFLE(even, odd, LASTS)

/* EXCHANGE(step, firsts, seconds) for each step of turning LANES x LANES words round: where the lanes of rows r and
 * r + step come from, those of r counted from 0 and those of r + step from LANES. */
#define LIST(...) __VA_ARGS__
#if LANES == 16
#define TURNS                                                                       \
    EXCHANGE(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),    \
             LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))       \
    EXCHANGE(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),     \
             LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))      \
    EXCHANGE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),     \
             LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))      \
    EXCHANGE(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),       \
             LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#else
#define TURNS                                                                                     \
    EXCHANGE(1, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))                 \
    EXCHANGE(2, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))                 \
    EXCHANGE(4, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#endif

ALWAYS vec choose(ints where, vec then, vec otherwise) {
    return (vec)((where & (ints)then) | (~where & (ints)otherwise));
}
/* a > b ? a : b, so b where one is no number: in one instruction, which compilers do not find. */
ALWAYS vec larger(vec a, vec b) {
#if defined(__AVX512F__) && LANES == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__) && LANES == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}
ALWAYS float add_lanes(vec v) {
    float sum = 0.0f;
    UNROLL for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* Sums in 16 lanes however many a vector has: the same bits on every processor. */
#define SUM_LANES 16
#define SUM_VECTORS (SUM_LANES / LANES)
typedef struct {
    vec part[SUM_VECTORS];
} sums;
ALWAYS float add_sums(sums s) {
    float sum = 0.0f;
    UNROLL for (int i = 0; i < SUM_LANES; i++) sum += s.part[i / LANES][i % LANES];
    return sum;
}

#endif
