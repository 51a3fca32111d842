/* The activations of gated MLPs. */
#pragma once
#include "simd/vectors.h"

/* x / (1 + e^-x), or for `gelu` x / (1 + e^-2u) = 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3). The
 * bounds keep the power finite and normal; below the first one both activations are 0, with an error of at most 1e-27.
 * NaN gives NaN. */
INLINE Floats activation(Floats x, int gelu) {
    x = larger_of((Floats){} - (gelu ? 9.0f : 69.0f), x);
    const Floats exponent = gelu ? x * -1.5957691216f * (1.0f + 0.044715f * x * x) : -x;
    return x * reciprocal_of(1.0f + exp_of(larger_of((Floats){} - 87.0f, exponent)));
}
