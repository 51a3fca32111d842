/* The activations of gated MLPs, and softplus, by which recurrences compute their steps and decays. */
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

/* log(1 + u) for u of 0 to 2^60: the logarithm of the rounded sum, plus what rounding took from it. */
INLINE Floats log1p_of(Floats u) {
    const Floats sum = 1.0f + u, lost = u - (sum - 1.0f);
    const Ints above = (Ints)sum - 0x3F3504F3; /* the bits of sqrt(1/2) */
    const Ints exponent = above >> 23;
    const Floats x = (Floats)((Ints)sum - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, Floats);
    const Floats y = LOG_POLYNOMIAL(x) * x * x * x - 2.12194440e-4f * e - 0.5f * x * x;
    return x + y + 0.693359375f * e + lost / sum;
}

/* log(1 + e^x); above 20 that is x, as torch has it. NaN gives NaN. */
INLINE Floats softplus_of(Floats x) {
    const Floats limited = -larger_of((Floats){} - 20.0f, -x), zero = {0};
    const Floats small = log1p_of(exp_of(larger_of(zero - 87.0f, limited)));
    const Ints is_large = x > 20.0f;
    return (Floats)((is_large & (Ints)x) | (~is_large & (Ints)small));
}
