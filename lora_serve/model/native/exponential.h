#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include "vectors.h"

/* e^x for x <= 0, NaN for NaN: 2^n times a polynomial of degree 6 (Cephes' expf). */
ALWAYS vec exponential(vec x) {
    const vec lowest = splat(-87.0f), half = splat(-0.5f);
    x = larger(lowest, x);
    const ints n = __builtin_convertvector(x * splat(1.44269504f) + half, ints);
    const vec whole = __builtin_convertvector(n, vec);
    const vec r = x - whole * splat(0.693359375f) - whole * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    return p * (vec)((n + 127) << 23);
}

#endif
